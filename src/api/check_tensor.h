// Rules of one tensor, for validate.cpp.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

#include "flash_dmattn/status.h"
#include "flash_dmattn/tensor.h"

namespace flash_dmattn::internal {

using Dims = std::array<std::int64_t, TensorView::kMaxRank>;

constexpr std::int64_t kMaxLength = std::numeric_limits<std::int32_t>::max();  // plans list keys as int32

enum class Layout { kAny, kUnitHeadDim, kContiguous };

// What a tensor whose shape follows from the inputs must look like.
struct Expected {
  const char* name;
  const TensorView* view;
  DType dtype;
  const char* form;  // "(B, Sq, H, D)"
  int rank;
  Dims shape;
  Layout layout;
};

// What error messages show. Only for a rule that is broken.
// "key (2, 8, 4, 32)". The rank may be any number here: checking it is what led to the message.
std::string show(const char* name, const TensorView& view);
std::string show_dtype(const char* name, DType dtype);

bool is_floating(DType dtype);

Status check_rank(const char* name, const TensorView& view, int min_rank, int max_rank);
Status check_length(const char* name, const TensorView& view, std::int64_t length);
// What must hold for any tensor once its rank and dtype are known to be right.
Status check_memory(const char* name, const TensorView& view, Layout layout);
Status check_expected(const Expected& expected);
Status check_all(std::initializer_list<Expected> table);

}  // namespace flash_dmattn::internal
