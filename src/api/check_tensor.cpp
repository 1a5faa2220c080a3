#include "api/check_tensor.h"

namespace flash_dmattn::internal {
namespace {

std::string list(const std::int64_t* values, int count) {
  std::string text = "(";
  for (int i = 0; i < count; ++i) text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  return text + ")";
}

std::string show_strides(const char* name, const TensorView& view) {
  return show(name, view) + " with strides " + list(view.strides.data(), view.rank);
}

bool has_elements(const TensorView& view) {
  for (int dim = 0; dim < view.rank; ++dim) {
    if (view.shape[dim] == 0) return false;
  }
  return true;
}

// Whether the bytes that the view counts, and those between its ends, fit in 64-bit offsets.
bool addressable(const TensorView& view) {
  auto bytes = static_cast<std::int64_t>(size_of(view.dtype));
  auto reach = bytes;
  for (int dim = 0; dim < view.rank; ++dim) {
    if (view.shape[dim] <= 1) continue;
    const std::int64_t stride = view.strides[dim];
    std::int64_t step = 0;
    if (stride == std::numeric_limits<std::int64_t>::min() ||
        __builtin_mul_overflow(stride < 0 ? -stride : stride, view.shape[dim] - 1, &step) ||
        __builtin_mul_overflow(step, static_cast<std::int64_t>(size_of(view.dtype)), &step) ||
        __builtin_add_overflow(reach, step, &reach) || __builtin_mul_overflow(bytes, view.shape[dim], &bytes)) {
      return false;
    }
  }
  return true;
}

bool contiguous(const TensorView& view) {
  std::int64_t stride = 1;
  for (int dim = view.rank - 1; dim >= 0; --dim) {
    if (view.shape[dim] != 1 && view.strides[dim] != stride) return false;
    stride *= view.shape[dim];
  }
  return true;
}

}  // namespace

std::string show(const char* name, const TensorView& view) {
  if (view.rank == 0) return std::string(name) + " without a tensor";
  if (view.rank < 0 || view.rank > TensorView::kMaxRank) {
    return std::string(name) + " with " + std::to_string(view.rank) + " dimensions";
  }
  return std::string(name) + " " + list(view.shape.data(), view.rank);
}

std::string show_per_key(const char* name, const TensorView& view, std::int64_t batch, std::int64_t keys) {
  if (view.rank != 2 || view.shape[0] != batch || view.shape[1] != keys) return show(name, view);
  return show(name, view) + ": if that is (B, Sk), make it (B, 1, Sk), in Python " + name + "[:, None, :]";
}

std::string show_dtype(const char* name, DType dtype) { return std::string(name) + " " + name_of(dtype); }

bool is_floating(DType dtype) {
  return dtype == DType::kFloat32 || dtype == DType::kFloat64 || dtype == DType::kFloat16 || dtype == DType::kBFloat16;
}

Status check_rank(const char* name, const TensorView& view, int min_rank, int max_rank) {
  if (view.rank == 0) return Status::invalid(name, "must be given", show(name, view));
  if (view.rank < min_rank || view.rank > max_rank) {
    std::string count = std::to_string(max_rank);
    for (int rank = max_rank - 1; rank >= min_rank; --rank) {
      count = std::to_string(rank) + (rank == max_rank - 1 ? " or " : ", ") + count;
    }
    return Status::invalid(name, "must have " + count + (count == "1" ? " dimension" : " dimensions"),
                           show(name, view));
  }
  return {};
}

Status check_length(const char* name, const TensorView& view, std::int64_t length) {
  if (length <= kMaxLength) return {};
  return Status::invalid(name, "must have fewer than 2^31 - 2048 positions", show(name, view));
}

bool product_fits(std::initializer_list<std::int64_t> sizes, std::int64_t limit) {
  std::int64_t product = 1;
  for (const std::int64_t size : sizes) {
    if (size > 1 && __builtin_mul_overflow(product, size, &product)) return false;
  }
  return product <= limit;
}

Status check_counts(const char* name, const TensorView& view, std::int64_t batch, std::int64_t heads,
                    std::int64_t length) {
  if (!product_fits({batch, heads}, kMaxHeads)) {
    return Status::invalid(name, "must have fewer than 2^31 heads in all batch elements", show(name, view));
  }
  if (!product_fits({batch, heads, length}, kMaxPositions)) {
    return Status::invalid(name, "must have fewer than 2^44 positions in all heads and batch elements",
                           show(name, view));
  }
  return {};
}

Status check_memory(const char* name, const TensorView& view, Layout layout) {
  for (int dim = 0; dim < view.rank; ++dim) {
    if (view.shape[dim] < 0) return Status::invalid(name, "must not have a negative size", show(name, view));
  }
  if (!addressable(view)) {
    return Status::invalid(name, "must be addressable with 64-bit offsets", show_strides(name, view));
  }
  if (!has_elements(view)) return {};
  if (view.data == nullptr) return Status::invalid(name, "must have data", show(name, view) + " at a null pointer");
  if (reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) != 0) {
    return Status::invalid(name, "must be aligned to its element size", show_dtype(name, view.dtype) + " unaligned");
  }
  if (layout == Layout::kContiguous && !contiguous(view)) {
    return Status::invalid(name, "must be contiguous", show_strides(name, view));
  }
  const int last = view.rank - 1;
  if (layout == Layout::kUnitHeadDim && view.shape[last] > 1 && view.strides[last] != 1) {
    return Status::invalid(name, "must have stride 1 in its head dim", show_strides(name, view));
  }
  return {};
}

Status check_expected(const Expected& expected) {
  const TensorView& view = *expected.view;
  if (Status status = check_rank(expected.name, view, expected.rank, expected.rank); !status.ok()) return status;
  if (view.dtype != expected.dtype) {
    return Status::invalid(expected.name, std::string("must be ") + name_of(expected.dtype),
                           show_dtype(expected.name, view.dtype));
  }
  for (int dim = 0; dim < expected.rank; ++dim) {
    if (view.shape[dim] != expected.shape[dim]) {
      const std::string wanted = list(expected.shape.data(), expected.rank);
      return Status::invalid(expected.name, std::string("must have the shape ") + expected.form + " = " + wanted,
                             show(expected.name, view));
    }
  }
  return check_memory(expected.name, view, expected.layout);
}

Status check_all(std::initializer_list<Expected> table) {
  for (const Expected& expected : table) {
    if (Status status = check_expected(expected); !status.ok()) return status;
  }
  return {};
}

}  // namespace flash_dmattn::internal
