// How kernels are launched.
#pragma once

#include <cuda_runtime_api.h>

#include <climits>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace flash_dmattn::internal::cuda {

struct LaunchShape {
  std::int64_t blocks;
  int threads;
  std::size_t shared_bytes = 0;  // of dynamic shared memory
  // The kernel may begin while the one before it in the stream ends, whoever launched that (ptx/dependent_launch.cuh).
  // Either it begins with begin_dependent_kernel, or with wait_for_kernels_before; or it ends with
  // end_dependent_kernel, and the one before it belongs to the same call, and has waited for what this one needs.
  bool is_dependent = false;
};

// Whether the current device runs code of this build that has begin_dependent_kernel's instructions.
bool has_dependent_launch();

// Nothing is launched without blocks.
template <typename... Params>
cudaError_t launch_blocks(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream,
                          const std::type_identity_t<Params>&... params) {
  if (shape.blocks == 0) return cudaSuccess;
  if (shape.blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  if (shape.shared_bytes > 0) {
    const cudaError_t error =
        cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shape.shared_bytes));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute dependent = {};
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = shape.is_dependent && has_dependent_launch() ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace flash_dmattn::internal::cuda
