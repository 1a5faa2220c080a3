// In place of src/cuda/ptx/copy.cuh: what kernels here use of it. An address of shared memory is its distance from the
// beginning. A copy in the background is done at once or when it is waited for, by chance.
#pragma once

#include <cstdint>
#include <cstring>

#include "emulation.h"

namespace flash_dmattn::internal::cuda {

inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(static_cast<const unsigned char*>(pointer) -
                                    static_cast<const unsigned char*>(cuda_emulation::dynamic_shared_memory()));
}

inline unsigned char* shared_memory_at(std::uint32_t shared, int bytes) {
  if (shared % bytes != 0) cuda_emulation::fail("shared address %u is not aligned to %d", shared, bytes);
  return static_cast<unsigned char*>(cuda_emulation::dynamic_shared_memory()) + shared;
}

inline void copy_async_16(std::uint32_t shared, const void* global, bool valid) {
  unsigned char* target = shared_memory_at(shared, 16);
  cuda_emulation::copy_in_background([=] {
    if (valid) {
      std::memcpy(target, global, 16);
    } else {
      std::memset(target, 0, 16);
    }
  });
}
inline void commit_copies() { cuda_emulation::commit_copies(); }
template <int Pending>
void wait_copies() {
  cuda_emulation::wait_copies(Pending);
}

// The rows are read when all lanes have come, and no lane goes on before.
template <typename Take>
void read_matrices(std::uint32_t shared, Take take) {
  std::uint64_t rows[cuda_emulation::kWarpLanes];
  std::memcpy(rows, cuda_emulation::exchange("load_matrices", shared), sizeof(rows));
  for (int matrix = 0; matrix < 4; ++matrix) {
    take(matrix, [&](int row, int column) {
      std::uint16_t element;
      const auto address = static_cast<std::uint32_t>(rows[matrix * 8 + row]);
      std::memcpy(&element, shared_memory_at(address, 16) + 2 * column, 2);
      return std::uint32_t{element};
    });
  }
  __syncwarp();
}
inline void load_matrices(std::uint32_t (&fragment)[4], std::uint32_t shared) {
  const int row = cuda_emulation::lane() / 4, column = 2 * (cuda_emulation::lane() % 4);
  read_matrices(shared, [&](int matrix, auto element) {
    fragment[matrix] = element(row, column) | element(row, column + 1) << 16;
  });
}
inline void load_matrices_transposed(std::uint32_t (&fragment)[4], std::uint32_t shared) {
  const int row = cuda_emulation::lane() / 4, column = 2 * (cuda_emulation::lane() % 4);
  read_matrices(shared, [&](int matrix, auto element) {
    fragment[matrix] = element(column, row) | element(column + 1, row) << 16;
  });
}

inline void store_shared(std::uint32_t shared, std::uint32_t value) {
  std::memcpy(shared_memory_at(shared, 4), &value, 4);
}

inline void prefetch_to_l1(const void* /*global*/) {}

}  // namespace flash_dmattn::internal::cuda
