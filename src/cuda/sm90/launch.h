// Host launchers of the sm90 kernels. Every one returns the launch's error.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/attention/params.h"

namespace flash_dmattn::internal::cuda::sm90 {

// What a forward reads, as the copy engine finds it.
struct ForwardMaps {
  CUtensorMap query, key, value;
};

// One unit of compilation for each element type and bucket (instance.cu).
template <typename Element, int kHeadDim>
cudaError_t launch_forward(const ForwardParams& params, const ForwardMaps& maps, cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda::sm90
