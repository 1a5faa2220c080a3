// sum += A B for one warp's part of a block's product, operands in shared memory.
#pragma once

#include <cstdint>

#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/shared_tile.cuh"

namespace flash_dmattn::internal::cuda {

// Where an operand's columns lie: along the depth of the product (as A's and B^T's usually do) or across it.
enum class Depth { kAlongRows, kAlongColumns };

// A 16-column block to the right of `first`, which may start anywhere.
template <int kColumns>
__device__ inline std::uint32_t block_address(SharedTile<kColumns> tile, int row, int first_column, int block,
                                              int half) {
  if constexpr ((SharedTile<kColumns>::kPieces & (SharedTile<kColumns>::kPieces - 1)) == 0) {
    // Parts start at a multiple of their own, power of two width: blocks then combine with the start by exclusive or.
    return SharedTile<kColumns>::column_block(tile.lane_address(row, first_column / 8 + half), block);
  } else {
    return tile.piece(row, first_column / 8 + 2 * block + half);
  }
}

// A: `a` holds rows x depth (Depth::kAlongRows: its rows are the product's rows) or depth x rows.
// B: `b` holds columns x depth (kAlongRows) or depth x columns.
// a_first, b_first: the warp's first row and column of the product.
// `between(step)` is called after every 16 of the depth.
struct Nothing {
  __device__ void operator()(int) const {}
};
template <typename Element, int kDepth, Depth kA, Depth kB, int kMTiles, int kNTiles, int kAColumns, int kBColumns,
          typename Between = Nothing>
__device__ inline void multiply_blocks(float (&sum)[kMTiles][kNTiles][4], SharedTile<kAColumns> a, int a_first,
                                       SharedTile<kBColumns> b, int b_first, Between between = {}) {
  static_assert(kNTiles % 2 == 0 && kDepth % 16 == 0);
  // Addresses are made anew for every product: kept for all products of a loop they would take too many registers.
  const int lane = recomputed(static_cast<int>(threadIdx.x) % 32);
  const int row_lane = row_major_lane_row(lane), row_half = row_major_lane_half(lane);
  const int column_lane = column_major_lane_row(lane), column_half = column_major_lane_half(lane);
  const auto load_a = [&](std::uint32_t(&fragment)[kMTiles][4], int depth) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      if constexpr (kA == Depth::kAlongRows) {
        load_matrices(fragment[m],
                      SharedTile<kAColumns>::column_block(a.lane_address(a_first + row_lane, row_half), depth) +
                          m * 16 * SharedTile<kAColumns>::kRowBytes);
      } else {
        load_matrices_transposed(fragment[m], block_address(a, column_lane, a_first, m, column_half) +
                                                  depth * 16 * SharedTile<kAColumns>::kRowBytes);
      }
    }
  };
  const auto load_b = [&](std::uint32_t(&fragment)[4], int depth, int pair) {
    if constexpr (kB == Depth::kAlongRows) {
      load_matrices(fragment,
                    SharedTile<kBColumns>::column_block(b.lane_address(b_first + column_lane, column_half), depth) +
                        pair * 16 * SharedTile<kBColumns>::kRowBytes);
    } else {
      load_matrices_transposed(fragment, block_address(b, row_lane, b_first, pair, row_half) +
                                             depth * 16 * SharedTile<kBColumns>::kRowBytes);
    }
  };
  // Fragments are read one step ahead of the products that use them.
  constexpr int kPairs = kNTiles / 2, kDepths = kDepth / 16;
  std::uint32_t a_fragment[2][kMTiles][4], b_fragment[2][4];
  load_a(a_fragment[0], 0);
  load_b(b_fragment[0], 0, 0);
#pragma unroll
  for (int depth = 0; depth < kDepths; ++depth) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int now = (depth * kPairs + pair) % 2;
      if (pair + 1 < kPairs) {
        load_b(b_fragment[now ^ 1], depth, pair + 1);
      } else if (depth + 1 < kDepths) {
        load_a(a_fragment[(depth + 1) % 2], depth + 1);
        load_b(b_fragment[now ^ 1], depth + 1, 0);
      }
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        multiply<Element>(sum[m][2 * pair], a_fragment[depth % 2][m], b_fragment[now][0], b_fragment[now][1]);
        multiply<Element>(sum[m][2 * pair + 1], a_fragment[depth % 2][m], b_fragment[now][2], b_fragment[now][3]);
      }
    }
    between(depth);
  }
}

template <int kMTiles, int kNTiles>
__device__ inline void clear(float (&sum)[kMTiles][kNTiles][4]) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[m][n][i] = 0;
}

}  // namespace flash_dmattn::internal::cuda
