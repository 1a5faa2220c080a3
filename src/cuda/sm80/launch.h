// Host launchers of the sm80 kernels. Every one returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/attention/backward_scratch.h"
#include "cuda/attention/params.h"

namespace flash_dmattn::internal::cuda {

// One unit of compilation for each element type and pair of buckets, of keys and of values (instance.cu).
template <typename Element, int kHeadDim, int kValueDim>
cudaError_t launch_forward(const ForwardParams& params, bool planned, cudaStream_t stream);
template <typename Element, int kHeadDim, int kValueDim>
cudaError_t launch_backward(const BackwardParams& params, bool planned, cudaStream_t stream);
// dquery, and the sums of a bias gradient with rows, in one order.
template <typename Element, int kHeadDim, int kValueDim>
cudaError_t launch_query_backward(const BackwardParams& params, bool planned, cudaStream_t stream);

// The backward's tiles: those of GPUs with little shared memory are narrow.
BackwardTiles backward_tiles(const AttentionProblem& problem, std::size_t shared_limit);

// dquery from the sums that launch_backward left, which lie as its threads' registers do, but for what it has stored.
cudaError_t launch_query_gradients(const BackwardProblem& problem, std::size_t shared_limit,
                                   const BackwardParams& params, cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
