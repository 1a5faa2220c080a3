// Tensor views: how callers hand memory to flash_dmattn. A view owns nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "flash_dmattn/export.h"

namespace FLASH_DMATTN_API flash_dmattn {

// What a view's elements are. kBool: one byte, 0 or 1.
enum class DType : std::uint8_t { kFloat32, kFloat64, kFloat16, kBFloat16, kBool, kInt32 };

// Bytes of an element.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kBool:
      return 1;
  }
  return 0;
}

// Where workspaces and plans must begin, in bytes: a cache line, and the widest vector.
constexpr std::size_t kMemoryAlignment = 64;

// "float32", "bool", ...
const char* name_of(DType dtype);

// A strided view of up to four dimensions. Strides count elements, not bytes, and may be 0 (a
// broadcast dimension). Rank 0 means "no tensor": optional arguments are left default-constructed.
// `data` may be null when a dimension is 0. Inputs are never written to.
struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int rank = 0;
  std::array<std::int64_t, kMaxRank> shape{};
  std::array<std::int64_t, kMaxRank> strides{};

  bool defined() const { return rank > 0; }
};

// A row-major (C order) view of `data`.
template <typename... Sizes>
TensorView contiguous_view(const void* data, DType dtype, Sizes... sizes) {
  static_assert(sizeof...(sizes) >= 1 && sizeof...(sizes) <= TensorView::kMaxRank);
  TensorView view;
  view.data = const_cast<void*>(data);
  view.dtype = dtype;
  view.rank = static_cast<int>(sizeof...(sizes));
  view.shape = {static_cast<std::int64_t>(sizes)...};
  std::int64_t stride = 1;
  for (int dim = view.rank - 1; dim >= 0; --dim) {
    view.strides[dim] = stride;
    stride *= view.shape[dim];
  }
  return view;
}

}  // namespace FLASH_DMATTN_API flash_dmattn
