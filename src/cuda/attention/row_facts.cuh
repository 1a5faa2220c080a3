// What lse says of a row in RowFacts (params.h).
#pragma once

#include <cmath>

#include "cuda/attention/params.h"

namespace flash_dmattn::internal::cuda {

// Marks a large row in place of its lse. It is a zero, since exponents subtract it from scores that subtract_large_lse
// (large_rows.cuh) has made relative before; and a negative one, to differ from a true lse of 0, which is stored as +0.
constexpr float kLargeRow = -0.0f;

__device__ inline bool is_large_row(float lse_log2) { return __float_as_uint(lse_log2) == __float_as_uint(kLargeRow); }

__device__ inline float row_fact_of_lse(float lse, bool has_stats) {
  const float lse_log2 = kLog2E * lse;
  return has_stats && fabsf(lse_log2) >= kLargeScore && isfinite(lse) ? kLargeRow : lse_log2 + 0.0f;
}

}  // namespace flash_dmattn::internal::cuda
