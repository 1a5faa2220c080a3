// The sm90 forward for one element type and bucket of head dims: cmake/cuda.cmake compiles this file once for each.
#include "cuda/attention/launch_blocks.cuh"
#include "cuda/sm90/forward.cuh"
#include "cuda/sm90/launch.h"

namespace flash_dmattn::internal::cuda::sm90 {

template <typename Element, int kHeadDim>
cudaError_t launch_forward(const ForwardParams& params, const ForwardMaps& maps, cudaStream_t stream) {
  using Config = ForwardConfig<kHeadDim>;
  using Block = ForwardBlock<Element, kHeadDim>;
  static_assert(Block::kSharedBytes <= kWideSharedBytes);
  const std::int64_t row_tiles = (params.rows + Config::kTileRows - 1) / Config::kTileRows;
  const std::int64_t blocks = row_tiles * params.heads * params.batch;
  return launch_blocks(forward_kernel<Element, kHeadDim>, blocks, Config::kThreads, Block::kSharedBytes, stream, params,
                       maps);
}

template cudaError_t launch_forward<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM>(const ForwardParams&,
                                                                                 const ForwardMaps&, cudaStream_t);

}  // namespace flash_dmattn::internal::cuda::sm90
