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
  // Blocks of a cluster (ptx/cluster.cuh), which divide `blocks`: neighbours. More than 8 are not promised by every GPU
  // that has clusters.
  int cluster_blocks = 1;
};
constexpr int kPortableClusterBlocks = 8;

// Whether the current device runs code of this build for compute capability 9.0 or later, which has the instructions of
// begin_dependent_kernel and of clusters.
bool runs_sm90_code();

// Nothing is launched without blocks.
template <typename... Params>
cudaError_t launch_blocks(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream,
                          const std::type_identity_t<Params>&... params) {
  if (shape.blocks == 0) return cudaSuccess;
  if (shape.blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  const auto set = [&](cudaFuncAttribute attribute, int value) {
    return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
  };
  cudaError_t error = cudaSuccess;
  if (shape.shared_bytes > 0) {
    error = set(cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shape.shared_bytes));
  }
  if (error == cudaSuccess && shape.cluster_blocks > kPortableClusterBlocks) {
    error = set(cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  }
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (shape.is_dependent && runs_sm90_code()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster_blocks > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(shape.cluster_blocks), 1, 1};
    // Else clusters are put where they leave others no room, and some wait until the first ones have ended.
    attributes[count].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
    attributes[count++].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicyLoadBalancing;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, params...);
}

}  // namespace flash_dmattn::internal::cuda
