// In place of src/cuda/ptx/wgmma.cuh, which says how operands lie in memory and in lanes. A product is done at any time
// before it is waited for: operands that are overwritten, and sums that are read, too early give other results.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <cstdint>
#include <cstring>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mma.cuh"
#include "emulation.h"

namespace flash_dmattn::internal::cuda {

enum class BRows { kColumns, kDepth };
enum class ARows { kRows, kDepth };

inline void wgmma_fence() {}
inline void wgmma_commit() {
  __syncwarp();
  if (cuda_emulation::lane() == 0) cuda_emulation::commit_products();
  __syncwarp();
}
template <int kPending>
void wgmma_wait() {
  __syncwarp();
  if (cuda_emulation::lane() == 0) cuda_emulation::wait_products(kPending);
  __syncwarp();
}

template <int kNTiles>
void settle(float (& /*sum*/)[kNTiles][4]) {}

inline std::uint64_t matrix_descriptor(std::uint32_t address, std::uint32_t panel, std::uint32_t row_group) {
  const auto field = [](std::uint32_t bytes) { return static_cast<std::uint64_t>((bytes & 0x3ffff) >> 4); };
  return field(address) | field(panel) << 16 | field(row_group) << 32 | 1ull << 62;
}
inline std::uint64_t brief_matrix_descriptor(std::uint32_t address, std::uint32_t panel, std::uint32_t row_group) {
  return matrix_descriptor(0, panel, row_group) | std::uint64_t{address >> 4};
}
inline std::uint64_t advanced(std::uint64_t descriptor, std::uint32_t bytes) { return descriptor + (bytes >> 4); }

// Element (row, column) of the matrix that a descriptor names.
template <typename Element>
float matrix_element(std::uint64_t descriptor, int row, int column) {
  const auto field = [&](int shift) { return static_cast<std::uint32_t>(descriptor >> shift & 0x3fff) << 4; };
  const std::uint32_t linear = field(0) + static_cast<std::uint32_t>(row / 8) * field(32) +
                               static_cast<std::uint32_t>(column / 64) * field(16) +
                               static_cast<std::uint32_t>(row % 8 * 128 + column % 64 * 2);
  std::uint16_t bits;
  std::memcpy(&bits, shared_memory_at(swizzled(linear), 2), 2);
  return all_numbers<Element>()[bits];
}

// sum += A B of a warp's 16 rows; read_a(a) fills them in.
template <typename Element, BRows kB, int kNTiles, typename ReadA>
void begin_warp_product(float (&sum)[kNTiles][4], std::uint64_t b_descriptor, bool accumulate, ReadA read_a) {
  constexpr int kWarpLanes = cuda_emulation::kWarpLanes, kColumns = 8 * kNTiles;
  std::array<std::uint64_t, kWarpLanes> sums;
  const std::uint64_t* addresses = cuda_emulation::exchange("wgmma", reinterpret_cast<std::uint64_t>(&sum[0][0]));
  std::memcpy(sums.data(), addresses, sizeof(sums));
  if (cuda_emulation::lane() == 0) {
    cuda_emulation::begin_product([=] {
      float a[16][16], b[16][kColumns], product[16][kColumns] = {};
      read_a(a);
      for (int depth = 0; depth < 16; ++depth)
        for (int column = 0; column < kColumns; ++column) {
          b[depth][column] = kB == BRows::kColumns ? matrix_element<Element>(b_descriptor, column, depth)
                                                   : matrix_element<Element>(b_descriptor, depth, column);
        }
      for (int row = 0; row < 16; ++row)
        for (int depth = 0; depth < 16; ++depth)
          for (int column = 0; column < kColumns; ++column) product[row][column] += a[row][depth] * b[depth][column];
      for (int lane = 0; lane < kWarpLanes; ++lane) {
        auto* own = reinterpret_cast<float*>(sums[lane]);
        for (int i = 0; i < 4 * kNTiles; ++i) {
          const float added = product[lane / 4 + i % 4 / 2 * 8][i / 4 * 8 + lane % 4 * 2 + i % 2];
          own[i] = accumulate ? own[i] + added : added;
        }
      }
    });
  }
  __syncwarp();
}

template <typename Element, BRows kB, ARows kA = ARows::kRows, bool kOverwrites = false, int kNTiles>
void wgmma(float (&sum)[kNTiles][4], std::uint64_t a_descriptor, std::uint64_t b_descriptor, bool accumulate) {
  const int first_row = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  begin_warp_product<Element, kB>(sum, b_descriptor, accumulate, [=](float(&a)[16][16]) {
    for (int row = 0; row < 16; ++row)
      for (int depth = 0; depth < 16; ++depth) {
        a[row][depth] = kA == ARows::kRows ? matrix_element<Element>(a_descriptor, first_row + row, depth)
                                           : matrix_element<Element>(a_descriptor, depth, first_row + row);
      }
  });
}

template <typename Element, BRows kB, int kNTiles>
void wgmma(float (&sum)[kNTiles][4], const std::uint32_t (&fragment)[4], std::uint64_t b_descriptor, bool accumulate) {
  const std::uint64_t own[] = {fragment[0] | std::uint64_t{fragment[1]} << 32,
                               fragment[2] | std::uint64_t{fragment[3]} << 32};
  std::array<std::array<std::uint64_t, cuda_emulation::kWarpLanes>, 2> lanes;
  std::memcpy(lanes.data(), cuda_emulation::exchange("wgmma", own, 2), sizeof(lanes));
  begin_warp_product<Element, kB>(sum, b_descriptor, accumulate, [=](float(&a)[16][16]) {
    for (int row = 0; row < 16; ++row)
      for (int depth = 0; depth < 16; ++depth) {
        const std::uint64_t words = lanes[depth / 8][row % 8 * 4 + depth % 8 / 2];
        a[row][depth] = all_numbers<Element>()[words >> (32 * (row / 8) + 16 * (depth % 2)) & 0xffff];
      }
  });
}

// As load_matrices reads them, or load_matrices_transposed. put(row_at, pair): row_at(row) is where one begins.
template <typename Put>
void write_matrices(std::uint32_t shared, const std::uint32_t (&fragment)[4], Put put) {
  std::uint64_t rows[cuda_emulation::kWarpLanes];
  std::memcpy(rows, cuda_emulation::exchange("store_matrices", shared), sizeof(rows));
  for (int matrix = 0; matrix < 4; ++matrix) {
    const auto row_at = [&](int row) {
      return shared_memory_at(static_cast<std::uint32_t>(rows[matrix * 8 + row]), 16);
    };
    put(row_at, fragment[matrix]);
  }
  __syncwarp();
}
inline void store_matrices(std::uint32_t shared, const std::uint32_t (&fragment)[4]) {
  const int row = cuda_emulation::lane() / 4, column = 2 * (cuda_emulation::lane() % 4);
  write_matrices(shared, fragment,
                 [&](auto row_at, std::uint32_t pair) { std::memcpy(row_at(row) + 2 * column, &pair, 4); });
}
inline void store_matrices_transposed(std::uint32_t shared, const std::uint32_t (&fragment)[4]) {
  const int row = cuda_emulation::lane() / 4, column = 2 * (cuda_emulation::lane() % 4);
  write_matrices(shared, fragment, [&](auto row_at, std::uint32_t pair) {
    for (int i = 0; i < 2; ++i) {
      const auto element = static_cast<std::uint16_t>(pair >> (16 * i));
      std::memcpy(row_at(column + i) + 2 * row, &element, 2);
    }
  });
}

}  // namespace flash_dmattn::internal::cuda
