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

}  // namespace flash_dmattn::internal::cuda
