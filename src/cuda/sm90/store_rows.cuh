// The end of the sm90 forward: from a consumer's accumulators to rows of the output.
#pragma once

#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/staged_rows.cuh"
#include "cuda/sm90/work_queue.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

// sums times `inverse`, rounded, to the output. The warp's rows, from first_row on, are brought in order in shared
// memory, kStagedColumns columns at a time. From there they go as boxes where there is room for these (kStoresBoxes): a
// warp's own stores wait in a queue until the GPU's memory takes them.
template <typename Block, int kDimNTiles>
__device__ inline void store_rows(const Block& block, int group, const Work& work, int head, int first_row,
                                  const float (&inverse)[2], const float (&sums)[1][kDimNTiles][4]) {
  constexpr unsigned kPieces = Block::kStagedColumns / 8, kRowBytes = 16 * kPieces, kRowsAtOnce = 32 / kPieces;
  const ForwardParams& params = block.params;
  const int count = params.rows - first_row, stride = static_cast<int>(params.out.token_stride);
  const unsigned own_thread = static_cast<unsigned>(recomputed(static_cast<int>(threadIdx.x))), lane = own_thread % 32;
  const std::uint32_t own =
      block.queries + (Block::kStagesInQueries ? 0 : static_cast<std::uint32_t>(Block::kStagingOffset)) +
      (4 * static_cast<unsigned>(group) + own_thread / 32 % 4) * (Block::kStagedBoxes * 16 * kRowBytes);
  const unsigned taken_row = lane / kPieces, taken_piece = lane % kPieces;
  std::uint16_t* const target = static_cast<std::uint16_t*>(params.out.data) + work.batch * params.out.batch_stride +
                                head * params.out.head_stride + std::int64_t{first_row} * stride;
#pragma unroll
  for (int first = 0; first < kDimNTiles; first += kPieces) {
    const std::uint32_t staged = own + first / static_cast<int>(kPieces) % Block::kStagedBoxes * (16 * kRowBytes);
    if constexpr (Block::kStoresBoxes) {
      if (lane == 0) wait_boxes_read<Block::kStagedBoxes - 1>();
      __syncwarp();
    } else if (first > 0) {
      __syncwarp();
    }
    stage_columns<typename Block::Element, kPieces>(staged, lane, sums, first, inverse);
    if (Block::kStoresBoxes && params.aligned) fence_async_proxy();
    __syncwarp();
    const int columns = params.value_dim - first * 8;
    if (!params.aligned) {
#pragma unroll 1
      for (unsigned index = lane; index < 16 * 8 * kPieces; index += 32) {
        const unsigned row = index / (8 * kPieces), column = index % (8 * kPieces);
        const std::uint32_t pair = load_shared(staged_piece<kPieces>(staged, row, column / 8) + column % 8 / 2 * 4);
        if (static_cast<int>(row) < count && static_cast<int>(column) < columns) {
          target[std::int64_t{static_cast<int>(row)} * stride + first * 8 + column] =
              static_cast<std::uint16_t>(pair >> (column % 2 * 16));
        }
      }
    } else if constexpr (Block::kStoresBoxes) {
      if (lane == 0) {
        store_box(block.maps.out, first * 8, first_row, head, work.batch, staged);
        commit_boxes();
      }
    } else {
      std::uint32_t pieces[16 / kRowsAtOnce][4];
#pragma unroll
      for (unsigned i = 0; i < 16 / kRowsAtOnce; ++i) {
        load_shared_16(pieces[i], staged_piece<kPieces>(staged, taken_row + i * kRowsAtOnce, taken_piece));
      }
      std::uint16_t* const taken = target + std::int64_t{static_cast<int>(taken_row)} * stride + taken_piece * 8;
      const bool has_column = static_cast<int>(taken_piece * 8) < columns;
#pragma unroll
      for (unsigned i = 0; i < 16 / kRowsAtOnce; ++i) {
        if (has_column && static_cast<int>(taken_row + i * kRowsAtOnce) < count) {
          *reinterpret_cast<uint4*>(taken + first * 8 + std::int64_t{static_cast<int>(i * kRowsAtOnce)} * stride) =
              make_uint4(pieces[i][0], pieces[i][1], pieces[i][2], pieces[i][3]);
        }
      }
    }
  }
}

// By every warp that stored boxes, before it stores the same rows again: else either could come last.
template <typename Block>
__device__ inline void wait_until_stored() {
  if (Block::kStoresBoxes && threadIdx.x % 32 == 0) wait_boxes_written();
}
// And before it ends: shared memory must outlast their reads.
template <typename Block>
__device__ inline void end_storing() {
  if (Block::kStoresBoxes && threadIdx.x % 32 == 0) wait_boxes_read<0>();
}

}  // namespace flash_dmattn::internal::cuda::sm90
