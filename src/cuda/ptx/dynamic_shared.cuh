// The shared memory of a block whose size its launch gives (LaunchShape::shared_bytes).
#pragma once

namespace flash_dmattn::internal::cuda {

// Aligned to 128 bytes.
template <typename T>
__device__ inline T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char memory[];
  return reinterpret_cast<T*>(memory);
}

}  // namespace flash_dmattn::internal::cuda
