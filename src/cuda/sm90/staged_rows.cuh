// A warp's accumulators on their way to 16 rows of a result: in shared memory, in which they are brought in order,
// since a lane has pieces of four bytes.
#pragma once

#include <cstdint>

#include "cuda/attention/fragments.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/wgmma.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

// Where a piece of 8 columns of a row lies, of kPieces in `staged`. Swizzled: eight rows of a piece, and all pieces of
// as many rows as fill 128 bytes, have banks of their own. Eight pieces are what the copy engine takes as a box.
template <unsigned kPieces>
__device__ inline std::uint32_t staged_piece(std::uint32_t staged, unsigned row, unsigned piece) {
  return staged + (row * kPieces + (piece ^ row * kPieces / 8 % kPieces)) * 16;
}

// Columns from 8 * first on, as many as there are of 8 * kPieces, times the factors of the thread's two rows, rounded.
template <typename Element, unsigned kPieces, int kNTiles>
__device__ inline void stage_columns(std::uint32_t staged, unsigned lane, const float (&sums)[1][kNTiles][4], int first,
                                     const float (&factors)[2]) {
#pragma unroll
  for (int n = 0; n < static_cast<int>(kPieces) && first + n < kNTiles; n += 2) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = pair_at(sums, i % 2, first + n + i / 2);
      words[i] = pack<Element>(pair[0] * factors[i % 2], pair[1] * factors[i % 2]);
    }
    store_matrices(staged_piece<kPieces>(staged, lane % 16, n + lane / 16), words);
  }
}

}  // namespace flash_dmattn::internal::cuda::sm90
