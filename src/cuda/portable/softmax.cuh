// The online softmax of Milakov and Gimelshein (arXiv 1805.02867), on a warp's fragments.
#pragma once

#include "cuda/ptx/mma.cuh"

namespace flash_dmattn::internal::cuda {

// The higher of `before` and the scores of the thread's row i, which lie in four neighbouring lanes.
template <int kMTiles, int kKeyTiles>
__device__ inline float row_maximum(const float (&scores)[kMTiles][kKeyTiles][4], int i, float before) {
  const int m = i / 2, half = 2 * (i % 2);
  float highest = before;
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) highest = fmaxf(highest, fmaxf(scores[m][n][half], scores[m][n][half + 1]));
  highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
  return fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
}

// What a row's scores are relative to. A row that has seen nothing yet: every probability must come out as 0, not as
// NaN.
__device__ inline float reference_of(float highest, float multiplier) {
  return highest == -INFINITY ? 0.0f : highest * multiplier;
}

// Turns scores, times `multiplier` in units of log2, into probabilities relative to the new row maxima, and rescales
// what was summed before: a thread's parts of row_sum, and sums.
template <int kMTiles, int kKeyTiles, int kDimTiles>
__device__ inline void update_softmax(float multiplier, float (&scores)[kMTiles][kKeyTiles][4],
                                      float (&row_max)[2 * kMTiles], float (&row_sum)[2 * kMTiles],
                                      float (&sums)[kMTiles][kDimTiles][4]) {
#pragma unroll
  for (int i = 0; i < 2 * kMTiles; ++i) {
    const int m = i / 2, half = 2 * (i % 2);
    const float highest = row_maximum(scores, i, row_max[i]), reference = reference_of(highest, multiplier);
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

// The same in two halves, of which the second one can be done share by share between products. First the new maxima,
// and what was summed before rescaled to them.
template <int kMTiles, int kKeyTiles, int kDimTiles>
__device__ inline void rescale_sums(float multiplier, const float (&scores)[kMTiles][kKeyTiles][4],
                                    float (&row_max)[2 * kMTiles], float (&row_sum)[2 * kMTiles],
                                    float (&sums)[kMTiles][kDimTiles][4], float (&reference)[2 * kMTiles]) {
  float rescale[2 * kMTiles];
  bool moved = false;
#pragma unroll
  for (int i = 0; i < 2 * kMTiles; ++i) {
    const float highest = row_maximum(scores, i, row_max[i]);
    reference[i] = reference_of(highest, multiplier);
    rescale[i] = exp2_fast(row_max[i] * multiplier - reference[i]);
    row_max[i] = highest;
    row_sum[i] *= rescale[i];
    moved |= rescale[i] != 1;
  }
  if (!__any_sync(~0u, moved)) return;
#pragma unroll
  for (int i = 0; i < 2 * kMTiles; ++i)
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) {
      sums[i / 2][n][2 * (i % 2)] *= rescale[i];
      sums[i / 2][n][2 * (i % 2) + 1] *= rescale[i];
    }
}

// Then one of `parts` shares of two neighbouring key tiles to probabilities, which are added to the thread's `sum`.
template <int kMTiles, int kKeyTiles>
__device__ inline void exponentiate(float multiplier, const float (&reference)[2 * kMTiles],
                                    float (&scores)[kMTiles][kKeyTiles][4], float (&sum)[2 * kMTiles], int first_tile,
                                    int part, int parts) {
  constexpr int kCount = 2 * 2 * 2 * kMTiles;  // of the thread's scores in two tiles
#pragma unroll
  for (int index = 0; index < kCount; ++index) {
    if (index * parts / kCount != part) continue;
    const int n = first_tile + index % 2, i = index / 4, pair = index / 2 % 2;
    float& score = scores[i / 2][n][2 * (i % 2) + pair];
    score = exp2_in_order(fmaf(score, multiplier, -reference[i]));
    sum[i] += score;
  }
}

}  // namespace flash_dmattn::internal::cuda
