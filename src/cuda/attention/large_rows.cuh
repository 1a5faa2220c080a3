// Rows of the backward whose lse is large (kLargeScore). As one number it is known to its rounding only, which may be
// more than the logarithm of the row's sum: probabilities would come out too large or too small by any factor. Their
// scores are compared with the row's maximum and sum, which the forward leaves apart for this.
#pragma once

#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/attention/softmax.cuh"

namespace flash_dmattn::internal::cuda {

// Stands in RowFacts for the lse of such a row, from whose scores it is then subtracted without effect. A true lse of 0
// is +0 there.
constexpr float kLargeRow = -0.0f;

__device__ inline bool is_large_row(float lse_log2) { return __float_as_uint(lse_log2) == __float_as_uint(kLargeRow); }

__device__ inline float row_fact_of_lse(float lse, bool has_stats) {
  const float lse_log2 = kLog2E * lse;
  return has_stats && fabsf(lse_log2) >= kLargeScore && isfinite(lse) ? kLargeRow : lse_log2 + 0.0f;
}

// Turns the scores of the thread's row i, which is `row` of the problem and a large one, into their distances from lse.
template <int kMTiles, int kNTiles>
__device__ inline void subtract_large_lse(const BackwardParams& params, int batch, int head, int row, int i,
                                          float (&scores)[kMTiles][kNTiles][4]) {
  const std::int64_t index = (static_cast<std::int64_t>(batch) * params.heads + head) * params.rows + row;
  const RowStats stats = params.row_stats[index];
  const HalfProduct highest(params.score, stats.x);
  const float half_log2_sum = 0.5f * kLog2E * stats.y;
#pragma unroll
  for (int n = 0; n < kNTiles; ++n)
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      float& score = scores[i / 2][n][2 * (i % 2) + pair];
      score = (highest.distance(params.score, score) - half_log2_sum) * params.score.inverse_half;
    }
}

}  // namespace flash_dmattn::internal::cuda
