// accumulators += A B, a warp's part of a block's product: B in shared memory, A there too or in registers.
//
// The accumulators are kMTiles x kNTiles products of the tensor core, of 16 rows and 8 columns each (fragments.cuh).
#pragma once

#include <cstdint>

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/shared_tile.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/mma.cuh"

namespace flash_dmattn::internal::cuda {

// Where an operand's columns lie: along the depth of the product (as A's and B^T's usually do) or across it.
enum class Depth { kAlongRows, kAlongColumns };

// The address at which a lane reads the `block`-th 16 columns from `first_column` on, which may be any multiple of 8.
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

struct Nothing {
  template <typename... Arguments>
  __device__ void operator()(Arguments...) const {}
};

// A: `a` holds rows x depth (Depth::kAlongRows: its rows are the product's rows) or depth x rows.
// B: `b` holds columns x depth (kAlongRows) or depth x columns.
// a_first, b_first: the warp's first row and column of the product.
// Fragments of B are read kAhead steps ahead of the products that use them, those of A a whole depth of 16 ahead: where
// few products follow a read, one step does not hide what it takes.
// between(step, steps) is called after the products of each step, so that what it does runs while the tensor cores do:
// the compiler by itself puts all other work before or behind the products.
template <typename Element, int kDepth, Depth kA, Depth kB, int kAhead = 1, int kMTiles, int kNTiles, int kAColumns,
          int kBColumns, typename Between = Nothing>
__device__ inline void gemm_from_shared(float (&accumulators)[kMTiles][kNTiles][4], SharedTile<kAColumns> a,
                                        int a_first, SharedTile<kBColumns> b, int b_first, Between between = {}) {
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
  constexpr int kPairs = kNTiles / 2, kDepths = kDepth / 16, kSteps = kPairs * kDepths, kRing = kAhead + 1;
  std::uint32_t a_fragment[2][kMTiles][4], b_fragment[kRing][4];
  load_a(a_fragment[0], 0);
#pragma unroll
  for (int step = 0; step < kAhead && step < kSteps; ++step) load_b(b_fragment[step], step / kPairs, step % kPairs);
    // Two loops: one of all steps would be too long for the compiler to unroll.
#pragma unroll
  for (int depth = 0; depth < kDepths; ++depth) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int step = depth * kPairs + pair, ahead = step + kAhead;
      // With one step ahead, A's next fragments come no sooner than B's: they take registers.
      if (depth + 1 < kDepths && pair == (kAhead == 1 ? kPairs - 1 : 0)) load_a(a_fragment[(depth + 1) % 2], depth + 1);
      if (ahead < kSteps) load_b(b_fragment[ahead % kRing], ahead / kPairs, ahead % kPairs);
      const std::uint32_t(&columns)[4] = b_fragment[step % kRing];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        multiply<Element>(accumulators[m][2 * pair], a_fragment[depth % 2][m], columns[0], columns[1]);
        multiply<Element>(accumulators[m][2 * pair + 1], a_fragment[depth % 2][m], columns[2], columns[3]);
      }
      between(step, kSteps);
    }
  }
}

// accumulators += A B with A the accumulators of another product, rounded to Element: its rows are this product's, its
// columns the depth. B: `b` holds depth x columns, from row `b_first` on. Fragments are read kAhead steps ahead.
// make(depth, part, parts) makes one of `parts` parts of A's 16 columns from 16 * depth on. It is called between the
// products of the 16 columns before, and at once for the first 16.
template <typename Element, int kAhead = 1, int kMTiles, int kDepthTiles, int kNTiles, int kColumns,
          typename Make = Nothing>
__device__ inline void gemm_from_registers(float (&accumulators)[kMTiles][kNTiles][4],
                                           const float (&a)[kMTiles][kDepthTiles][4], SharedTile<kColumns> b,
                                           int b_first, Make make = {}) {
  static_assert(kNTiles % 2 == 0 && kDepthTiles % 2 == 0);
  const int lane = recomputed(static_cast<int>(threadIdx.x) % 32);
  const std::uint32_t b_lane = b.lane_address(b_first + row_major_lane_row(lane), row_major_lane_half(lane));
  constexpr int kPairs = kNTiles / 2, kDepths = kDepthTiles / 2, kSteps = kPairs * kDepths, kRing = kAhead + 1;
  const auto load = [&](std::uint32_t(&fragment)[4], int step) {
    load_matrices_transposed(fragment, SharedTile<kColumns>::column_block(b_lane, step % kPairs) +
                                           step / kPairs * 16 * SharedTile<kColumns>::kRowBytes);
  };
  std::uint32_t b_fragment[kRing][4];
#pragma unroll
  for (int step = 0; step < kAhead && step < kSteps; ++step) load(b_fragment[step], step);
  make(0, 0, 1);
#pragma unroll
  for (int depth = 0; depth < kDepths; ++depth) {
    std::uint32_t a_fragment[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      const float(&left)[4] = a[m][2 * depth];
      const float(&right)[4] = a[m][2 * depth + 1];
      a_fragment[m][0] = pack<Element>(left[0], left[1]);
      a_fragment[m][1] = pack<Element>(left[2], left[3]);
      a_fragment[m][2] = pack<Element>(right[0], right[1]);
      a_fragment[m][3] = pack<Element>(right[2], right[3]);
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const int step = depth * kPairs + pair;
      if (step + kAhead < kSteps) load(b_fragment[(step + kAhead) % kRing], step + kAhead);
      const std::uint32_t(&columns)[4] = b_fragment[step % kRing];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        multiply<Element>(accumulators[m][2 * pair], a_fragment[m], columns[0], columns[1]);
        multiply<Element>(accumulators[m][2 * pair + 1], a_fragment[m], columns[2], columns[3]);
      }
      if (depth + 1 < kDepths) make(depth + 1, pair, kPairs);
    }
  }
}

}  // namespace flash_dmattn::internal::cuda
