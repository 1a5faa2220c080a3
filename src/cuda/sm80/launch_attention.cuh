// Definitions of the attention launchers, for instance.cu.
#pragma once

#include <algorithm>

#include "cuda/attention/block_order.cuh"
#include "cuda/launch_blocks.cuh"
#include "cuda/sm80/backward.cuh"
#include "cuda/sm80/forward.cuh"
#include "cuda/sm80/launch.h"
#include "cuda/sm80/query_backward.cuh"

namespace flash_dmattn::internal::cuda {

template <typename Element, int kHeadDim, int kValueDim, bool kPlanned, bool kRowBias, bool kNarrow = false>
cudaError_t launch_forward_kernel(const ForwardParams& params, cudaStream_t stream) {
  using Block = ForwardBlock<Element, kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow>;
  using Config = typename Block::Config;
  static_assert(!kNarrow || Block::kSharedBytes <= kLeastSharedBytes);
  if constexpr (Block::kSharedBytes > kLeastSharedBytes) {
    if (Block::kSharedBytes > params.shared_limit) {
      return launch_forward_kernel<Element, kHeadDim, kValueDim, kPlanned, kRowBias, true>(params, stream);
    }
  }
  const std::int64_t row_tiles = (params.rows + Config::kTileRows - 1) / Config::kTileRows;
  const std::int64_t blocks = row_tiles * params.heads * params.batch;
  ForwardParams ordered = params;
  if constexpr (kPlanned) {
    const std::int64_t at_once = std::int64_t{Config::kBlocksPerProcessor} * params.processors;
    const cudaError_t error = order_blocks<Block>(&ordered, blocks, at_once, 2 * at_once, stream);
    if (error != cudaSuccess) return error;
  }
  return launch_blocks(forward_kernel<Element, kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow>,
                       {blocks, Config::kThreads, Block::kSharedBytes}, stream, ordered);
}

template <typename Element, int kHeadDim, int kValueDim, bool kPlanned, bool kRowBias, bool kNarrow>
cudaError_t launch_backward_kernel(const BackwardParams& params, cudaStream_t stream) {
  using Block = BackwardBlock<Element, kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow>;
  using Config = typename Block::Config;
  static_assert(Block::kSharedBytes <= (kNarrow ? kLeastSharedBytes : kWideSharedBytes));
  std::int64_t blocks = key_blocks<Config::kTileKeys, kPlanned>(params);
  if (Block::kStays) blocks = std::min(blocks, std::int64_t{Block::kBlocksPerProcessor} * params.processors);
  const auto launch = [&](auto* kernel) {
    return launch_blocks(kernel, {blocks, Config::kThreads, Block::kSharedBytes}, stream, params);
  };
  // Which of these has something to do, only the device knows.
  constexpr bool kMayStore = Block::kMayStoreQueries;
  cudaError_t error = launch(backward_kernel<Element, kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow, false, false>);
  if constexpr (kMayStore) {
    if (error == cudaSuccess && params.met_once.tiles != nullptr) {
      error = launch(backward_kernel<Element, kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow, false, true>);
    }
  }
  if constexpr (Config::kLargeRowsApart) {
    if (error == cudaSuccess) {
      error = launch(backward_kernel<Element, kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow, true, kMayStore>);
    }
  }
  return error;
}

template <typename Element, int kHeadDim, int kValueDim, bool kPlanned, bool kRowBias, bool kNarrow = false>
cudaError_t launch_query_backward_kernel(const BackwardParams& params, cudaStream_t stream) {
  using Block = QueryBackwardBlock<Element, kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow>;
  using Config = typename Block::Config;
  static_assert(!kNarrow || Block::kSharedBytes <= kLeastSharedBytes);
  if constexpr (Block::kSharedBytes > kLeastSharedBytes) {
    if (Block::kSharedBytes > params.shared_limit) {
      return launch_query_backward_kernel<Element, kHeadDim, kValueDim, kPlanned, kRowBias, true>(params, stream);
    }
  }
  const std::int64_t row_tiles = (params.rows + Config::kTileRows - 1) / Config::kTileRows;
  int entry_batches = 1, entry_heads = 1;
  if (kRowBias && params.dbias_sums != nullptr) {
    entry_batches = params.dbias.batches == 1 ? params.batch : 1;
    entry_heads = static_cast<int>(params.dbias.head_divisor);
  }
  const std::int64_t blocks = row_tiles * (params.heads / entry_heads) * (params.batch / entry_batches);
  return launch_blocks(query_backward_kernel<Element, kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow>,
                       {blocks, Config::kThreads, Block::kSharedBytes}, stream, params, entry_batches, entry_heads);
}

// Calls `launch` with two constants: whether there is a plan, and whether the bias has rows of its own: that takes
// registers which the others need.
template <typename Launch>
cudaError_t by_form(const AttentionParams& params, bool planned, Launch launch) {
  if (params.bias_by_row) {
    return planned ? launch.template operator()<true, true>() : launch.template operator()<false, true>();
  }
  return planned ? launch.template operator()<true, false>() : launch.template operator()<false, false>();
}

template <typename Element, int kHeadDim, int kValueDim>
cudaError_t launch_forward(const ForwardParams& params, bool planned, cudaStream_t stream) {
  return by_form(params, planned, [&]<bool kPlanned, bool kRowBias>() {
    return launch_forward_kernel<Element, kHeadDim, kValueDim, kPlanned, kRowBias>(params, stream);
  });
}

template <typename Element, int kHeadDim, int kValueDim>
cudaError_t launch_backward(const BackwardParams& params, bool planned, cudaStream_t stream) {
  return by_form(params, planned, [&]<bool kPlanned, bool kRowBias>() {
    return is_narrow(params.shared_limit)
               ? launch_backward_kernel<Element, kHeadDim, kValueDim, kPlanned, kRowBias, true>(params, stream)
               : launch_backward_kernel<Element, kHeadDim, kValueDim, kPlanned, kRowBias, false>(params, stream);
  });
}

template <typename Element, int kHeadDim, int kValueDim>
cudaError_t launch_query_backward(const BackwardParams& params, bool planned, cudaStream_t stream) {
  return by_form(params, planned, [&]<bool kPlanned, bool kRowBias>() {
    return launch_query_backward_kernel<Element, kHeadDim, kValueDim, kPlanned, kRowBias>(params, stream);
  });
}

}  // namespace flash_dmattn::internal::cuda
