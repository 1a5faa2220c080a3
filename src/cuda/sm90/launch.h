// Host launchers of the sm90 kernels. Every one returns the launch's error.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/attention/params.h"

namespace flash_dmattn::internal::cuda::sm90 {

// What a forward reads, as the copy engine finds it: boxes of a consumer's rows, and of a tile of keys (the plan's, if
// there is one).
struct ForwardMaps {
  CUtensorMap query, key, value;
};

struct Sm90ForwardParams : ForwardParams {
  // In a plan: a block's two consumers own the same rows of two neighbouring heads, which see the same, instead of
  // neighbouring rows of one.
  bool pairs_heads = false;
  std::int32_t works = 0;             // work tiles of the launch, which its blocks share
  std::int32_t* next_huge = nullptr;  // scratch of so many (work_queue.cuh)
};

// One unit of compilation for each element type and bucket (instance.cu).
template <typename Element, int kHeadDim>
cudaError_t launch_forward(const Sm90ForwardParams& params, const ForwardMaps& maps, bool planned, cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda::sm90
