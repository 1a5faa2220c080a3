// Overwrites hidden scores, or what was made of them, in the fragments of a warp.
#pragma once

#include <cstdint>

#include "cuda/attention/fragments.cuh"

namespace flash_dmattn::internal::cuda {

// `words`: of the 32 rows that hold the warp's, one for each column, from the fragments' first column on; the warp's
// rows begin at bit `first_bit`. column_of(n): the first of the thread's two columns of column tile n.
template <int kMTiles, int kNTiles, typename ColumnOf>
__device__ inline void hide_by_words(float (&scores)[kMTiles][kNTiles][4], const std::uint32_t* words, int first_bit,
                                     ColumnOf column_of, float hidden) {
  const int shift = first_bit + static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
    const uint2 pair_words = *reinterpret_cast<const uint2*>(words + column_of(n));
    const std::uint32_t shifted[2] = {pair_words.x >> shift, pair_words.y >> shift};
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        if ((shifted[pair] & (1u << (8 * i))) == 0) scores[i / 2][n][2 * (i % 2) + pair] = hidden;
      }
  }
}

// The thread's row i sees the columns below limit_of(i).
template <int kMTiles, int kNTiles, typename LimitOf, typename ColumnOf>
__device__ inline void hide_past_limits(float (&scores)[kMTiles][kNTiles][4], LimitOf limit_of, ColumnOf column_of,
                                        float hidden) {
#pragma unroll
  for (int i = 0; i < 2 * kMTiles; ++i) {
    const int limit = limit_of(i);
    for_each_in_row(scores, i, [&](int n, int pair, float& score) {
      if (column_of(n) + pair >= limit) score = hidden;
    });
  }
}

}  // namespace flash_dmattn::internal::cuda
