// In place of src/cuda/ptx/tma.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstring>

#include "cuda/ptx/mbarrier.cuh"
#include "emulation.h"

namespace flash_dmattn::internal::cuda {

// visit(address in shared memory, address in global memory or null, which is outside of the tensor) of every element.
template <typename Visit>
void for_each_of_box(const CUtensorMap& map, int column, int token, int head, int batch, std::uint32_t shared,
                     Visit visit) {
  if (shared % 1024 != 0 && map.box[1] % 8 == 0) cuda_emulation::fail("a box at %u of shared memory", shared);
  const auto inside = [&](int dim, int index) {
    return index >= 0 && static_cast<std::uint64_t>(index) < map.sizes[dim];
  };
  for (int row = 0; row < static_cast<int>(map.box[1]); ++row) {
    for (int i = 0; i < static_cast<int>(map.box[0]); ++i) {
      unsigned char* global = nullptr;
      if (inside(0, column + i) && inside(1, token + row) && inside(2, head) && inside(3, batch)) {
        global = map.data + 2 * (column + i) + map.strides[0] * static_cast<std::uint64_t>(token + row) +
                 map.strides[1] * static_cast<std::uint64_t>(head) + map.strides[2] * static_cast<std::uint64_t>(batch);
      }
      visit(shared_memory_at(swizzled(shared + static_cast<std::uint32_t>(128 * row + 2 * i)), 2), global);
    }
  }
}

inline void load_box(std::uint32_t shared, const CUtensorMap& map, int column, int token, int head, int batch,
                     std::uint32_t barrier) {
  copy_telling(barrier, 2 * map.box[0] * map.box[1], [=] {
    for_each_of_box(map, column, token, head, batch, shared, [](unsigned char* own, const unsigned char* global) {
      if (global != nullptr) {
        std::memcpy(own, global, 2);
      } else {
        std::memset(own, 0, 2);
      }
    });
  });
}

inline void load_bytes(std::uint32_t shared, const void* global, std::uint32_t bytes, std::uint32_t barrier) {
  if (bytes % 16 != 0) cuda_emulation::fail("a copy of %u bytes", bytes);
  copy_telling(barrier, bytes, [=] { std::memcpy(shared_memory_at(shared, 16), global, bytes); });
}

inline void store_box(const CUtensorMap& map, int column, int token, int head, int batch, std::uint32_t shared) {
  cuda_emulation::store_in_bulk([=] {
    for_each_of_box(map, column, token, head, batch, shared, [](const unsigned char* own, unsigned char* global) {
      if (global != nullptr) std::memcpy(global, own, 2);
    });
  });
}
inline void commit_boxes() { cuda_emulation::commit_stores(); }
template <int kPending>
void wait_boxes_read() {
  cuda_emulation::wait_stores(kPending);
}
inline void wait_boxes_written() { cuda_emulation::wait_stores(0); }

}  // namespace flash_dmattn::internal::cuda
