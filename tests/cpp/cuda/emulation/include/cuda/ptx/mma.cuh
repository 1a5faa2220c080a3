// In place of src/cuda/ptx/mma.cuh, which says how fragments lie in lanes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>

#include "emulation.h"

namespace flash_dmattn::internal::cuda {

// Every number that 16 bits stand for.
template <typename Element>
const float* all_numbers() {
  static const auto numbers = [] {
    auto table = std::make_unique<std::array<float, 65536>>();
    for (unsigned bits = 0; bits < table->size(); ++bits) {
      (*table)[bits] = static_cast<float>(Element::of(static_cast<std::uint16_t>(bits)));
    }
    return table;
  }();
  return numbers->data();
}

// sum += a b
template <typename Element>
void multiply(float (&sum)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  // What every lane has of both, two words at a time: a[0] and a[1], a[2] and a[3], b0 and b1.
  const auto pair_of = [](std::uint32_t low, std::uint32_t high) { return low | std::uint64_t{high} << 32; };
  const std::uint64_t own[] = {pair_of(a[0], a[1]), pair_of(a[2], a[3]), pair_of(b0, b1)};
  const auto* lanes = cuda_emulation::exchange("multiply", own, 3);
  const float* numbers = all_numbers<Element>();
  const auto element = [&](int pair, int lane, int word, int half) {
    return numbers[lanes[pair][lane] >> (32 * word + 16 * half) & 0xffff];
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
