// In place of src/cuda/ptx/copy.cuh. An address of shared memory is its distance from the beginning of the dynamic one;
// of what is declared in a kernel, which is static here, that from an anchor in the program, kDeclared further on. What
// another block of the cluster has is at kOfBlock times its rank plus 1. A copy in the background is done by chance, at
// once or at any time before it is waited for.
#pragma once

#include <cstdint>
#include <cstring>

#include "emulation.h"

namespace flash_dmattn::internal::cuda {

constexpr std::uint32_t kDeclared = 1u << 30, kOfBlock = 1u << 24;
alignas(1024) inline unsigned char declared_anchor[1024];

inline std::uint32_t shared_address(const void* pointer) {
  const auto distance_from = [pointer](const void* begin) {
    return reinterpret_cast<std::uintptr_t>(pointer) - reinterpret_cast<std::uintptr_t>(begin);
  };
  const std::uintptr_t distance = distance_from(cuda_emulation::dynamic_shared_memory());
  if (distance < cuda_emulation::dynamic_shared_bytes()) return static_cast<std::uint32_t>(distance);
  return kDeclared + static_cast<std::uint32_t>(distance_from(declared_anchor));
}

inline unsigned char* shared_memory_at(std::uint32_t shared, int bytes) {
  if (shared % static_cast<unsigned>(bytes) != 0) {
    cuda_emulation::fail("shared address %u is not aligned to %d", shared, bytes);
  }
  if (shared < kOfBlock) return static_cast<unsigned char*>(cuda_emulation::dynamic_shared_memory()) + shared;
  if (shared < kDeclared / 2) {
    void* memory = cuda_emulation::dynamic_shared_memory_of(static_cast<int>(shared / kOfBlock) - 1);
    return static_cast<unsigned char*>(memory) + shared % kOfBlock;
  }
  return declared_anchor + static_cast<std::int32_t>(shared - kDeclared);
}

// Where a byte of a row of 128 lies in a panel: its piece of 16 is swizzled by the row's address.
inline std::uint32_t swizzled(std::uint32_t shared) { return shared ^ (shared >> 7 & 7) << 4; }

inline unsigned char* at_kept_address(unsigned char* memory) { return memory; }

enum class L2Policy : std::uint64_t { kUsedOnce, kKept };

template <int kBytes>
void copy_async(std::uint32_t shared, const void* global, bool valid) {
  unsigned char* target = shared_memory_at(shared, kBytes);
  cuda_emulation::copy_in_background([=] {
    if (valid) {
      std::memcpy(target, global, kBytes);
    } else {
      std::memset(target, 0, kBytes);
    }
  });
}
inline void copy_async_16(std::uint32_t shared, const void* global, bool valid) {
  copy_async<16>(shared, global, valid);
}
inline void copy_async_16(std::uint32_t shared, const void* global, bool valid, L2Policy /*policy*/) {
  copy_async<16>(shared, global, valid);
}
inline void copy_async_4(std::uint32_t shared, const void* global, bool valid) { copy_async<4>(shared, global, valid); }
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
inline void store_shared_8(std::uint32_t shared, const std::uint32_t (&words)[2]) {
  std::memcpy(shared_memory_at(shared, 8), words, 8);
}
inline void store_shared_16(std::uint32_t shared, const std::uint32_t (&words)[4]) {
  std::memcpy(shared_memory_at(shared, 16), words, 16);
}

inline std::uint32_t load_shared(std::uint32_t shared) {
  std::uint32_t value;
  std::memcpy(&value, shared_memory_at(shared, 4), 4);
  return value;
}
inline float2 load_shared_float2(std::uint32_t shared) {
  float2 value;
  std::memcpy(&value, shared_memory_at(shared, 8), 8);
  return value;
}
inline void load_shared_8(std::uint32_t (&words)[2], std::uint32_t shared) {
  std::memcpy(words, shared_memory_at(shared, 8), 8);
}
inline void load_shared_16(std::uint32_t (&words)[4], std::uint32_t shared) {
  std::memcpy(words, shared_memory_at(shared, 16), 16);
}

inline void prefetch_to_l1(const void* /*global*/) {}

inline void add_to_global(float* sum, float a, float b, float c, float d) {
  sum[0] += a, sum[1] += b, sum[2] += c, sum[3] += d;
}
inline void add_to_global(float* sum, float a, float b, float c, float d, L2Policy /*policy*/) {
  add_to_global(sum, a, b, c, d);
}

}  // namespace flash_dmattn::internal::cuda
