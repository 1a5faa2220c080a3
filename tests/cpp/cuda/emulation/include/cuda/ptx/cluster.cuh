// In place of src/cuda/ptx/cluster.cuh.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "emulation.h"

namespace flash_dmattn::internal::cuda {

// Kernels that ask declare shared memory, which blocks that run at the same time would have in common here.
constexpr bool kHasClusters = false;

inline void sync_cluster() { cuda_emulation::sync_cluster(); }
inline int block_rank() { return cuda_emulation::block_rank(); }
inline std::uint32_t address_in_block(std::uint32_t address, int rank) {
  return address + kOfBlock * static_cast<std::uint32_t>(rank + 1);
}

inline float load_from_block(std::uint32_t address) { return __uint_as_float(load_shared(address)); }
inline float2 load_pair_from_block(std::uint32_t address) { return load_shared_float2(address); }

inline void arrive_in_block(std::uint32_t barrier) { EmulatedBarrier::at(barrier).arrive(); }
inline void store_in_block(std::uint32_t address, std::int32_t word, std::uint32_t barrier) {
  copy_telling(barrier, sizeof(word), [=] { store_shared(address, static_cast<std::uint32_t>(word)); });
}
inline void copy_to_block(std::uint32_t address, std::uint32_t shared, std::uint32_t bytes, std::uint32_t barrier) {
  copy_telling(barrier, bytes,
               [=] { std::memcpy(shared_memory_at(address, 16), shared_memory_at(shared, 16), bytes); });
}

}  // namespace flash_dmattn::internal::cuda
