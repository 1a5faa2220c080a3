// Where a head's entries of a broadcast tensor begin.
#pragma once

#include <cstdint>

namespace flash_dmattn::internal::cuda::sm90 {

// As in BroadcastView, with a division that is fast on a GPU; some kernels of sm80 have no registers for it.
__device__ inline std::uint32_t entry_of(int head, std::int64_t head_divisor) {
  return static_cast<std::uint32_t>(head) / static_cast<std::uint32_t>(head_divisor);
}
template <typename View>
__device__ inline std::int64_t offset_of(const View& view, int batch, int head) {
  return batch * view.batch_stride + entry_of(head, view.head_divisor) * view.head_stride;
}

}  // namespace flash_dmattn::internal::cuda::sm90
