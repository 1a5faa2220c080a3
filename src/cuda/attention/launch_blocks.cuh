// How every attention kernel is launched.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace flash_dmattn::internal::cuda {

// `shared_bytes`: of dynamic shared memory, which a kernel has to be allowed first. Nothing is launched without blocks.
template <typename... Params>
cudaError_t launch_blocks(void (*kernel)(Params...), std::int64_t blocks, int threads, std::size_t shared_bytes,
                          cudaStream_t stream, const Params&... params) {
  if (blocks == 0) return cudaSuccess;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const cudaError_t error =
      cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<unsigned>(blocks), threads, shared_bytes, stream>>>(params...);
  return cudaGetLastError();
}

}  // namespace flash_dmattn::internal::cuda
