// In place of src/cuda/ptx/mma.cuh, which says how fragments lie in lanes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "emulation.h"

namespace flash_dmattn::internal::cuda {

// sum += a b
template <typename Element>
void multiply(float (&sum)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  // What every lane has of both, two words at a time: a[0] and a[1], a[2] and a[3], b0 and b1.
  std::uint64_t lanes[3][cuda_emulation::kWarpLanes];
  const auto gather = [&](int pair, std::uint32_t low, std::uint32_t high) {
    std::memcpy(lanes[pair], cuda_emulation::exchange("multiply", low | std::uint64_t{high} << 32), sizeof(lanes[0]));
  };
  gather(0, a[0], a[1]);
  gather(1, a[2], a[3]);
  gather(2, b0, b1);
  const auto element = [&](int pair, int lane, int word, int half) {
    const auto bits = static_cast<std::uint16_t>(lanes[pair][lane] >> (32 * word + 16 * half));
    return static_cast<float>(Element::of(bits));
  };
  const int row = cuda_emulation::lane() / 4, column = 2 * (cuda_emulation::lane() % 4);
  for (int i = 0; i < 4; ++i) {
    for (int depth = 0; depth < 16; ++depth) {
      const int in_quad = depth % 8 / 2, half = depth % 2;
      sum[i] += element(depth / 8, row * 4 + in_quad, i / 2, half) *
                element(2, (column + i % 2) * 4 + in_quad, depth / 8, half);
    }
  }
}

inline std::uint32_t transposed_matrix(std::uint32_t pair) {
  std::uint64_t lanes[cuda_emulation::kWarpLanes];
  std::memcpy(lanes, cuda_emulation::exchange("transposed_matrix", pair), sizeof(lanes));
  const int row = cuda_emulation::lane() / 4, column = 2 * (cuda_emulation::lane() % 4);
  const auto element = [&](int own_row, int own_column) {
    return static_cast<std::uint16_t>(lanes[own_row * 4 + own_column / 2] >> (16 * (own_column % 2)));
  };
  return element(column, row) | std::uint32_t{element(column + 1, row)} << 16;
}

}  // namespace flash_dmattn::internal::cuda
