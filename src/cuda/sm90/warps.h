// What the warps of a block have: keys that they bring, panels of shared memory that these lie in, and their share of a
// multiprocessor's registers.
#pragma once

#include <initializer_list>

namespace flash_dmattn::internal::cuda::sm90 {

constexpr int kWarpKeys = 32;  // of a tile, that a producer's warp brings: each of its lanes knows one
constexpr int kWarpRows = 16;  // of a product, that a consumer's warp has

// How many panels of 64 columns, 128 bytes a row, a tile with so many columns has.
constexpr int panels(int columns) { return (columns + 63) / 64; }

// Whether every warp group gets the registers a thread that it asks for. A block begins with as many, in eights, as all
// of its threads can have alike; where these are given up and taken anew (setmaxnreg), a group that asks for more than
// others have given up waits forever.
constexpr bool has_registers(std::initializer_list<int> groups) {
  constexpr int kRegisters = 65536, kGroupThreads = 128;
  const int threads = static_cast<int>(groups.size()) * kGroupThreads;
  int wanted = 0;
  for (const int registers : groups) wanted += registers;
  return wanted <= kRegisters / threads / 8 * 8 * static_cast<int>(groups.size());
}

}  // namespace flash_dmattn::internal::cuda::sm90
