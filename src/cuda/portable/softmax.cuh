// The online softmax of Milakov and Gimelshein (arXiv 1805.02867), on a warp's fragments.
#pragma once

#include "cuda/ptx/mma.cuh"

namespace flash_dmattn::internal::cuda {

// Turns scores, times `multiplier` in units of log2, into probabilities relative to the new row maxima, and rescales
// what was summed before: a thread's parts of row_sum, and sums. A row has its scores in four neighbouring lanes.
template <int kMTiles, int kKeyTiles, int kDimTiles>
__device__ inline void update_softmax(float multiplier, float (&scores)[kMTiles][kKeyTiles][4],
                                      float (&row_max)[2 * kMTiles], float (&row_sum)[2 * kMTiles],
                                      float (&sums)[kMTiles][kDimTiles][4]) {
#pragma unroll
  for (int i = 0; i < 2 * kMTiles; ++i) {
    const int m = i / 2, half = 2 * (i % 2);
    float highest = row_max[i];
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) highest = fmaxf(highest, fmaxf(scores[m][n][half], scores[m][n][half + 1]));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    // A row that has seen nothing yet: every probability must come out as 0, not as NaN.
    const float reference = highest == -INFINITY ? 0.0f : highest * multiplier;
    const float rescale = exp2_fast(row_max[i] * multiplier - reference);
    row_max[i] = highest;
    float sum = 0;
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        float& score = scores[m][n][half + pair];
        score = exp2_fast(fmaf(score, multiplier, -reference));
        sum += score;
      }
    row_sum[i] = row_sum[i] * rescale + sum;
    // Seldom: after the first tiles a maximum hardly moves.
    if (__any_sync(~0u, rescale != 1)) {
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
        sums[m][n][half] *= rescale;
        sums[m][n][half + 1] *= rescale;
      }
    }
  }
}

}  // namespace flash_dmattn::internal::cuda
