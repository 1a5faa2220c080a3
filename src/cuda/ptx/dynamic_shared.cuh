// The shared memory of a block whose size its launch gives (LaunchShape::shared_bytes).
#pragma once

namespace flash_dmattn::internal::cuda {

// Aligned to 128 bytes.
template <typename T>
__device__ inline T* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char memory[];
  return reinterpret_cast<T*>(memory);
}

// Aligned to 1024 bytes, as panels of swizzled rows are.
__device__ inline unsigned char* dynamic_shared_panels() {
  extern __shared__ __align__(1024) unsigned char panel_memory[];
  return panel_memory;
}

}  // namespace flash_dmattn::internal::cuda
