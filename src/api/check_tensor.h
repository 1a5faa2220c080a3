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

// Positions are int32 wherever they are listed, and kernels round lengths up to whole tiles.
constexpr std::int64_t kMaxLength = std::numeric_limits<std::int32_t>::max() - 2048;
// Heads of all batch elements: GPUs count them in 32 bits.
constexpr std::int64_t kMaxHeads = std::numeric_limits<std::int32_t>::max();
// Positions of all heads. Calls hold up to some kilobytes for each of them (sums of gradients in float32, indices,
// lists of plans), and so far below 2^63 bytes.
constexpr std::int64_t kMaxPositions = (std::int64_t{1} << 44) - 1;

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

// Texts for error messages, made once a rule turns out to be broken.
// "key (2, 8, 4, 32)". The rank may be any number here: checking it is what led to the message.
std::string show(const char* name, const TensorView& view);
std::string show_dtype(const char* name, DType dtype);
// As `show`, and what to do if the tensor lacks nothing but the dimension of heads.
std::string show_per_key(const char* name, const TensorView& view, std::int64_t batch, std::int64_t keys);

bool is_floating(DType dtype);

Status check_rank(const char* name, const TensorView& view, int min_rank, int max_rank);
Status check_length(const char* name, const TensorView& view, std::int64_t length);
// Whether a * b * ... stays within `limit`. Zeros count as one, so that no product of some of the sizes overflows
// either.
bool product_fits(std::initializer_list<std::int64_t> sizes, std::int64_t limit);
// That a view has few enough heads in all batch elements, and positions in all of these. None of the three is negative.
Status check_counts(const char* name, const TensorView& view, std::int64_t batch, std::int64_t heads,
                    std::int64_t length);
// What must hold for any tensor once its rank and dtype are known to be right.
Status check_memory(const char* name, const TensorView& view, Layout layout);
Status check_expected(const Expected& expected);
Status check_all(std::initializer_list<Expected> table);

}  // namespace flash_dmattn::internal
