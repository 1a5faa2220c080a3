// Where a head's entries of a broadcast tensor begin: as BroadcastView says it, by a division of 32 bits, which takes
// a fraction of the time on a GPU. (Some kernels of sm80 have no registers for it.)
#pragma once

#include <cstdint>

namespace flash_dmattn::internal::cuda {

__device__ inline std::uint32_t entry_of_head(std::int32_t head, std::int64_t head_divisor) {
  return static_cast<std::uint32_t>(head) / static_cast<std::uint32_t>(head_divisor);
}

template <typename View>
__device__ inline std::int64_t entry_offset(const View& view, std::int64_t batch, std::int32_t head) {
  return batch * view.batch_stride + entry_of_head(head, view.head_divisor) * view.head_stride;
}

}  // namespace flash_dmattn::internal::cuda
