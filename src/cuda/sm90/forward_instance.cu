// The sm90 forward for one element type and pair of buckets, of keys and of values: cmake/cuda.cmake compiles this file
// once for each.
#include <algorithm>
#include <climits>

#include "cuda/launch_blocks.cuh"
#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/launch.h"

namespace flash_dmattn::internal::cuda::sm90 {
namespace {

template <typename Element, int kHeadDim, int kValueDim, bool kPlanned, Scoring kScoring>
cudaError_t launch_forward_kernel(const Sm90ForwardParams& params, const ForwardMaps& maps, cudaStream_t stream) {
  using Block = ForwardBlock<Element, kHeadDim, kValueDim, kPlanned, kScoring>;
  using Config = typename Block::Config;
  const int tile_rows = params.pairs_heads ? Config::kTileRows / 2 : Config::kTileRows;
  const int heads = params.pairs_heads ? params.heads / 2 : params.heads;
  const std::int64_t row_tiles = (params.rows + tile_rows - 1) / tile_rows;
  const std::int64_t blocks = row_tiles * heads * params.batch;
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  Sm90ForwardParams ordered = params;
  ordered.works = static_cast<std::int32_t>(blocks);
  LaunchShape shape = {blocks, Config::kThreads, Block::kSharedBytes, kPlanned};
  if constexpr (kPlanned) {
    const cudaError_t error = order_blocks<Block>(&ordered, blocks, params.processors, 2 * params.processors, stream);
    if (error != cudaSuccess) return error;
  }
  // Blocks stay for many works where a work is short; those of a plan, or of the causal rule, differ too much to be
  // divided beforehand: a counter does.
  constexpr std::int32_t kShortWork = 4096;  // keys
  const bool stays = kPlanned || params.keys <= kShortWork;
  const bool counts =
      kPlanned ? ordered.order.count != 0 : stays && params.visibility.is_causal && blocks > params.processors;
  if (!counts) {
    ordered.order.taken = nullptr;
  } else if (!kPlanned) {
    const cudaError_t error = cudaMemsetAsync(ordered.order.taken, 0, sizeof(*ordered.order.taken), stream);
    if (error != cudaSuccess) return error;
  }
  if (stays) shape.blocks = std::min<std::int64_t>(blocks, params.processors);
  return launch_blocks(forward_kernel<Element, kHeadDim, kValueDim, kPlanned, kScoring>, shape, stream, ordered, maps);
}

}  // namespace

template <typename Element, int kHeadDim, int kValueDim>
cudaError_t launch_forward(const Sm90ForwardParams& params, const ForwardMaps& maps, bool planned,
                           cudaStream_t stream) {
  return by_kernel<kHeadDim, kValueDim>(params, planned, [&]<bool kPlanned, Scoring kScoring>() {
    return launch_forward_kernel<Element, kHeadDim, kValueDim, kPlanned, kScoring>(params, maps, stream);
  });
}

template cudaError_t launch_forward<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_VALUE_DIM>(
    const Sm90ForwardParams&, const ForwardMaps&, bool, cudaStream_t);

}  // namespace flash_dmattn::internal::cuda::sm90
