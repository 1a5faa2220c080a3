// From a block's fragments of dK and dV to global memory.
#pragma once

#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/attention/row_walk.cuh"
#include "cuda/attention/tokens.cuh"
#include "cuda/ptx/arithmetic.cuh"

namespace flash_dmattn::internal::cuda {

// Adds a warp's fragment, times `factor`, to fp32 sums (B, Sk, Hkv, kHeadDim). The fragment begins at row `first_row`
// of the block's `keys` (less than 0: none) and at column `first_column`. Neighbouring lanes trade halves, so that each
// adds four columns of one row.
template <int kHeadDim, int kMTiles, int kNTiles>
__device__ inline void add_to_sums(const float (&gradient)[kMTiles][kNTiles][4], const BackwardParams& params,
                                   const KeyBlock& block, const std::int32_t* keys, int first_row, int first_column,
                                   float* sums, float factor) {
  const int lane = recomputed(static_cast<int>(threadIdx.x)) % 32;  // not kept over what comes before
  const bool odd = lane % 2 != 0;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
    const int key = keys[first_row + m * 16 + (odd ? 8 : 0) + lane / 4];
    float* row =
        sums +
        ((static_cast<std::int64_t>(block.batch) * params.keys + key) * params.key_heads + block.key_head) * kHeadDim;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      const float(&part)[4] = gradient[m][n];
      const float first = __shfl_xor_sync(~0u, odd ? part[0] : part[2], 1);
      const float second = __shfl_xor_sync(~0u, odd ? part[1] : part[3], 1);
      const int column = first_column + n * 8 + lane % 4 / 2 * 4;
      if (key < 0) continue;
      if (odd) {
        add_to_global(row + column, first * factor, second * factor, part[2] * factor, part[3] * factor);
      } else {
        add_to_global(row + column, part[0] * factor, part[1] * factor, first * factor, second * factor);
      }
    }
  }
}

// Stores all warps' fragments, times `factor`, as the block's kTileKeys rows of `target`, which has `columns`, through
// `tile`, which nobody reads any more. The keys of the block are neighbours.
template <typename Element, int kTileKeys, int kThreads, int kHeadDim, int kMTiles, int kNTiles>
__device__ inline void store_keys(const float (&gradient)[kMTiles][kNTiles][4], const BackwardParams& params,
                                  const KeyBlock& block, SharedTile<kHeadDim> tile, int first_row, int first_column,
                                  const TokenView& target, int columns, float factor) {
  using Tile = SharedTile<kHeadDim>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* pair = &gradient[m][n][2 * half];
        store_shared(tile.piece(first_row + m * 16 + half * 8 + lane / 4, first_column / 8 + n) + 4 * (lane % 4),
                     pack<Element>(pair[0] * factor, pair[1] * factor));
      }
  __syncthreads();
  auto* base = static_cast<std::uint16_t*>(target.data) + block.batch * target.batch_stride +
               block.key_head * target.head_stride;
  for (int index = static_cast<int>(threadIdx.x); index < kTileKeys * Tile::kPieces; index += kThreads) {
    const int row = index / Tile::kPieces, piece = index % Tile::kPieces;
    const int key = block.tile * kTileKeys + row;
    if (key >= params.keys) continue;
    std::uint32_t words[4];
    load_shared_16(words, tile.piece(row, piece));
    store_piece(base + key * target.token_stride, piece, words, columns, params.aligned);
  }
}

}  // namespace flash_dmattn::internal::cuda
