// Definitions of the attention launchers, for instance.cu.
#pragma once

#include "cuda/portable/backward.cuh"
#include "cuda/portable/forward.cuh"
#include "cuda/portable/launch.h"
#include "cuda/portable/query_backward.cuh"

namespace flash_dmattn::internal::cuda {

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

template <typename Element, int kHeadDim, bool kPlanned, bool kRowBias>
cudaError_t launch_forward_kernel(const ForwardParams& params, cudaStream_t stream) {
  using Config = ForwardConfig<kHeadDim, kPlanned, kRowBias>;
  const std::int64_t row_tiles = (params.rows + Config::kRows - 1) / Config::kRows;
  return launch_blocks(forward_kernel<Element, kHeadDim, kPlanned, kRowBias>, row_tiles * params.heads * params.batch,
                       Config::kThreads, Config::kSharedBytes, stream, params);
}

template <typename Element, int kHeadDim, bool kPlanned, bool kRowBias>
cudaError_t launch_backward_kernel(const BackwardParams& params, cudaStream_t stream) {
  using Config = BackwardConfig<kHeadDim>;
  std::int64_t tiles = params.takes_ranges ? (params.keys + Config::kKeys - 1) / Config::kKeys : 0;
  if (kPlanned) {
    tiles +=
        static_cast<std::int64_t>(params.plan.capacity / Config::kKeys) * (params.chunk_limit - params.first_chunk);
  }
  return launch_blocks(backward_kernel<Element, kHeadDim, kPlanned, kRowBias>,
                       tiles * params.batch * params.key_heads * params.splits, Config::kThreads, Config::kSharedBytes,
                       stream, params);
}

template <typename Element, int kHeadDim, bool kPlanned, bool kRowBias>
cudaError_t launch_query_backward_kernel(const BackwardParams& params, cudaStream_t stream) {
  using Config = QueryBackwardConfig<kHeadDim, kPlanned>;
  const std::int64_t row_tiles = (params.rows + Config::kRows - 1) / Config::kRows;
  int shared_batches = 1, shared_heads = 1;
  if (kRowBias && params.dbias_sums != nullptr) {
    shared_batches = params.dbias.batches == 1 ? params.batch : 1;
    shared_heads = static_cast<int>(params.dbias.head_divisor);
  }
  return launch_blocks(query_backward_kernel<Element, kHeadDim, kPlanned, kRowBias>,
                       row_tiles * (params.heads / shared_heads) * (params.batch / shared_batches), Config::kThreads,
                       Config::kSharedBytes, stream, params, shared_batches, shared_heads);
}

// A bias with rows of its own takes registers that the others need: it has kernels of its own.
template <typename Element, int kHeadDim>
cudaError_t launch_forward(const ForwardParams& params, bool planned, cudaStream_t stream) {
  if (params.bias_by_row) {
    return planned ? launch_forward_kernel<Element, kHeadDim, true, true>(params, stream)
                   : launch_forward_kernel<Element, kHeadDim, false, true>(params, stream);
  }
  return planned ? launch_forward_kernel<Element, kHeadDim, true, false>(params, stream)
                 : launch_forward_kernel<Element, kHeadDim, false, false>(params, stream);
}

template <typename Element, int kHeadDim>
cudaError_t launch_backward(const BackwardParams& params, bool planned, cudaStream_t stream) {
  if (params.bias_by_row) {
    return planned ? launch_backward_kernel<Element, kHeadDim, true, true>(params, stream)
                   : launch_backward_kernel<Element, kHeadDim, false, true>(params, stream);
  }
  return planned ? launch_backward_kernel<Element, kHeadDim, true, false>(params, stream)
                 : launch_backward_kernel<Element, kHeadDim, false, false>(params, stream);
}

template <typename Element, int kHeadDim>
cudaError_t launch_query_backward(const BackwardParams& params, bool planned, cudaStream_t stream) {
  if (params.bias_by_row) {
    return planned ? launch_query_backward_kernel<Element, kHeadDim, true, true>(params, stream)
                   : launch_query_backward_kernel<Element, kHeadDim, false, true>(params, stream);
  }
  return planned ? launch_query_backward_kernel<Element, kHeadDim, true, false>(params, stream)
                 : launch_query_backward_kernel<Element, kHeadDim, false, false>(params, stream);
}

}  // namespace flash_dmattn::internal::cuda
