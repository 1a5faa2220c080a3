// Rows that the last words of a packed mask have and a problem does not.
#pragma once

#include <cstdint>

#include "cuda/plan/visibility.h"

namespace flash_dmattn::internal::cuda {

// The bits of word number `word` that stand for rows past the last of `rows`.
__device__ inline std::uint32_t rows_past_last(int rows, int word) {
  const int left = min(max(rows - word * kWordRows, 0), kWordRows);
  return left == kWordRows ? 0 : ~0u << left;
}

}  // namespace flash_dmattn::internal::cuda
