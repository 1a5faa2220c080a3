// In place of src/cuda/ptx/cluster.cuh: blocks run one after another, so there are no clusters.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace flash_dmattn::internal::cuda {

constexpr bool kHasClusters = false;
inline void sync_cluster() { std::abort(); }
inline std::uint32_t address_in_block(std::uint32_t /*address*/, int /*rank*/) { std::abort(); }
inline float load_from_block(std::uint32_t /*address*/) { std::abort(); }
inline float2 load_pair_from_block(std::uint32_t /*address*/) { std::abort(); }
inline int block_rank() { return 0; }
inline void arrive_in_block(std::uint32_t /*barrier*/) { std::abort(); }
inline void store_in_block(std::uint32_t /*address*/, std::int32_t /*word*/, std::uint32_t /*barrier*/) {
  std::abort();
}
inline void copy_to_block(std::uint32_t /*address*/, std::uint32_t /*shared*/, std::uint32_t /*bytes*/,
                          std::uint32_t /*barrier*/) {
  std::abort();
}

}  // namespace flash_dmattn::internal::cuda
