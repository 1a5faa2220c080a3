// Tiles of 16-bit elements in shared memory, swizzled so that matrices can be read and written by rows and by columns
// without bank conflicts, and the fragments of tensor core operands read from them.
#pragma once

#include <cstdint>

#include "cuda/ptx/copy.cuh"

namespace flash_dmattn::internal::cuda {

// Rows of kColumns elements. A row is cut into pieces of 16 bytes; piece p of row r lies where the swizzle says.
template <int kColumns>
struct SharedTile {
  static_assert(kColumns % 32 == 0);
  static constexpr int kPieces = kColumns / 8;
  static constexpr int kRowBytes = kColumns * 2;
  // Rows of whole 128-byte lines permute the eight pieces of a line; others the four pieces of half a line, since two
  // neighbouring rows then start in different halves.
  static constexpr bool kWholeLines = kPieces % 8 == 0;
  static constexpr int kGroup = kWholeLines ? 8 : 4;

  std::uint32_t address;

  __device__ static int swizzle(int row) { return kWholeLines ? row & 7 : (row >> 1) & 3; }
  __device__ std::uint32_t piece(int row, int piece) const {
    return address + (row * kPieces + (piece ^ swizzle(row))) * 16;
  }

  // The address at which a lane reads 16x16 blocks: `row` is a multiple of 8 plus the lane's own row, `half` the half
  // of the block's columns that it points to.
  __device__ std::uint32_t lane_address(int row, int half) const { return piece(row, half); }
  // A lane_address moved `block` 16-column blocks to the right.
  __device__ static std::uint32_t column_block(std::uint32_t lane, int block) {
    constexpr int kBlocks = kGroup / 2;
    return (lane ^ ((block % kBlocks) * 32)) + (block / kBlocks) * (kGroup * 16);
  }
};

// Which row and half (of 16 columns) of a 16x16 block a lane points to, for the two orders of its four matrices.
__device__ inline int row_major_lane_row(int lane) { return lane % 16; }
__device__ inline int row_major_lane_half(int lane) { return lane / 16; }
__device__ inline int column_major_lane_row(int lane) { return lane % 8 + 8 * (lane / 16); }
__device__ inline int column_major_lane_half(int lane) { return (lane / 8) % 2; }

}  // namespace flash_dmattn::internal::cuda
