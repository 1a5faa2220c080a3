// The last pass of the sm80 backward: dquery, rounded from sums that lie as backward_kernel's registers do.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/attention/head_dims.h"
#include "cuda/attention/met_once.cuh"
#include "cuda/attention/tokens.cuh"
#include "cuda/launch_blocks.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm80/backward_config.h"
#include "cuda/sm80/launch.h"

namespace flash_dmattn::internal::cuda {
namespace {

// One block a tile of rows, in the order in which backward_kernel's threads left their registers; through shared
// memory, so that whole rows are written. Tiles whose dquery that kernel has stored are left alone.
template <typename Element, int kHeadDim, bool kNarrow>
__global__ void __launch_bounds__(BackwardConfig<kHeadDim, kHeadDim, kNarrow>::kThreads)
    query_gradient_kernel(const __grid_constant__ BackwardProblem problem,
                          const __grid_constant__ BackwardParams params) {
  using Config = BackwardConfig<kHeadDim, kHeadDim, kNarrow>;
  using Tile = SharedTile<kHeadDim>;
  constexpr int kQueryRows = Config::kTileRows / Config::kQueryRowWarps;
  constexpr int kQueryDims = kHeadDim * Config::kQueryRowWarps / Config::kWarps;
  __shared__ __align__(1024) unsigned char shared[Config::kQueryBytes];
  const Tile tile{shared_address(shared)};
  begin_dependent_kernel();
  const int row_tiles = static_cast<int>((problem.rows + Config::kTileRows - 1) / Config::kTileRows);
  const int first_row = static_cast<int>(blockIdx.x) % row_tiles * Config::kTileRows;
  const std::int64_t pair = blockIdx.x / static_cast<unsigned>(row_tiles);
  if (stores_tile(params.met_once, params.plan, static_cast<int>(pair / problem.heads),
                  static_cast<int>(pair % problem.heads), first_row)) {
    return;
  }
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int lane_row = warp % Config::kQueryRowWarps * kQueryRows + lane / 4;
  const int first_piece = warp / Config::kQueryRowWarps * kQueryDims / 8;
  const auto* source = reinterpret_cast<const float4*>(params.dquery_sums + static_cast<std::int64_t>(blockIdx.x) *
                                                                                Config::kTileRows * kHeadDim);
  const float scale = static_cast<float>(problem.scale);
#pragma unroll
  for (int m = 0; m < kQueryRows / 16; ++m)
#pragma unroll
    for (int n = 0; n < kQueryDims / 8; ++n) {
      const float4 part = __ldcs(source + (m * (kQueryDims / 8) + n) * Config::kThreads + threadIdx.x);
      const int row = lane_row + m * 16;
      store_shared(tile.piece(row, first_piece + n) + 4 * (lane % 4), pack<Element>(part.x * scale, part.y * scale));
      store_shared(tile.piece(row + 8, first_piece + n) + 4 * (lane % 4),
                   pack<Element>(part.z * scale, part.w * scale));
    }
  __syncthreads();
  auto* target = static_cast<std::uint16_t*>(problem.dquery.data) + pair / problem.heads * problem.dquery.batch_stride +
                 pair % problem.heads * problem.dquery.head_stride;
  const int head_dim = static_cast<int>(problem.head_dim);
  const bool aligned = head_dim % 8 == 0 && reinterpret_cast<std::uintptr_t>(problem.dquery.data) % 16 == 0;
  for (int index = static_cast<int>(threadIdx.x); index < Config::kTileRows * Tile::kPieces;
       index += Config::kThreads) {
    const int row = index / Tile::kPieces, piece = index % Tile::kPieces;
    if (first_row + row >= problem.rows) continue;
    std::uint32_t words[4];
    load_shared_16(words, tile.piece(row, piece));
    store_piece(target + (first_row + row) * problem.dquery.token_stride, piece, words, head_dim, aligned);
  }
}

template <typename Element, int kHeadDim, bool kNarrow>
cudaError_t query_gradients_of(const BackwardProblem& problem, const BackwardParams& params, cudaStream_t stream) {
  using Config = BackwardConfig<kHeadDim, kHeadDim, kNarrow>;
  const std::int64_t tiles = (problem.rows + Config::kTileRows - 1) / Config::kTileRows * problem.heads * problem.batch;
  return launch_blocks(query_gradient_kernel<Element, kHeadDim, kNarrow>,
                       {.blocks = tiles, .threads = Config::kThreads}, stream, problem, params);
}

template <typename Element>
cudaError_t query_gradients_by_bucket(const BackwardProblem& problem, std::size_t shared_limit,
                                      const BackwardParams& params, cudaStream_t stream) {
  return with_bucket(wider_head_dim(problem), [&]<int kHeadDim>() {
    return is_narrow(shared_limit) ? query_gradients_of<Element, kHeadDim, true>(problem, params, stream)
                                   : query_gradients_of<Element, kHeadDim, false>(problem, params, stream);
  });
}

template <int kHeadDim, int kValueDim, bool kNarrow>
constexpr BackwardTiles tiles_of() {
  using Config = BackwardConfig<kHeadDim, kValueDim, kNarrow>;
  return {.rows = Config::kTileRows,
          .keys = Config::kTileKeys,
          .stored_share = Config::kStoredShare,
          .value_columns = kValueDim};
}

}  // namespace

BackwardTiles backward_tiles(const AttentionProblem& problem, std::size_t shared_limit) {
  return with_bucket(wider_head_dim(problem), [&]<int kHeadDim>() {
    return with_value_bucket<kHeadDim>(problem.value_dim, [&]<int kValueDim>() {
      return is_narrow(shared_limit) ? tiles_of<kHeadDim, kValueDim, true>() : tiles_of<kHeadDim, kValueDim, false>();
    });
  });
}

cudaError_t launch_query_gradients(const BackwardProblem& problem, std::size_t shared_limit,
                                   const BackwardParams& params, cudaStream_t stream) {
  return problem.dtype == DType::kBFloat16
             ? query_gradients_by_bucket<__nv_bfloat16>(problem, shared_limit, params, stream)
             : query_gradients_by_bucket<__half>(problem, shared_limit, params, stream);
}

}  // namespace flash_dmattn::internal::cuda
