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
  // The kernel begins with begin_dependent_kernel, or ends with end_dependent_kernel (ptx/dependent_launch.cuh), and
  // the one before it in the stream, which belongs to the same call, begins with the former, or with
  // let_next_kernel_begin: it may begin while that one ends.
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
