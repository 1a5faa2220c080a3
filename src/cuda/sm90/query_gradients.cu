// The last pass of the sm90 backward: dquery, rounded from sums that lie as its consumers' registers do.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/attention/call.h"
#include "cuda/attention/met_once.cuh"
#include "cuda/attention/tokens.cuh"
#include "cuda/launch_blocks.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/pipeline.cuh"

namespace flash_dmattn::internal::cuda::sm90 {
namespace {

constexpr int kPartRows = 64;

// Of a head, those of the last tile included that have no rows.
template <int kHeadDim>
__host__ __device__ std::int64_t row_parts(std::int64_t rows) {
  constexpr int kTileRows = BackwardConfig<kHeadDim, kHeadDim>::kTileRows;
  return (rows + kTileRows - 1) / kTileRows * (kTileRows / kPartRows);
}

// One block for 64 rows of a tile. Of eight columns of these a warp group's threads have left four sums each, as
// accumulators have them (ptx/wgmma.cuh); the next eight columns follow.
template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(kWarpGroup) query_gradient_kernel(const __grid_constant__ BackwardParams params) {
  begin_dependent_kernel();
  const TokenView& dquery = params.dquery;
  // 32 bits: divisions of 64 take long.
  const auto parts = static_cast<unsigned>(row_parts<kHeadDim>(params.rows));
  // From the last to the first: of those that were added to last, the cache still has some.
  const unsigned number = gridDim.x - 1 - blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, pair = static_cast<int>(number / parts);
  const int first_row = static_cast<int>(number % parts) * kPartRows, row = first_row + thread / 32 * 16 + lane / 4;
  if (stores_tile(params.met_once, params.plan, pair / params.heads, pair % params.heads, first_row)) return;
  const auto* source =
      reinterpret_cast<const float4*>(params.dquery_sums + std::int64_t{number} * kPartRows * kHeadDim) + thread;
  auto* target = static_cast<std::uint16_t*>(dquery.data) + pair / params.heads * dquery.batch_stride +
                 pair % params.heads * dquery.head_stride + row * dquery.token_stride;
  const float scale = params.score.scale;
#pragma unroll
  for (int first = 0; first < kHeadDim / 8; first += 4) {
    float4 four[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) four[n] = __ldcg(source + (first + n) * kWarpGroup);
#pragma unroll 1
    for (int color = 1; color < params.dquery_colors; ++color) {
      const float4* sums = source + color * (std::int64_t{gridDim.x} * (kPartRows * kHeadDim / 4));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float4 part = __ldcg(sums + (first + n) * kWarpGroup);
        four[n] = make_float4(four[n].x + part.x, four[n].y + part.y, four[n].z + part.z, four[n].w + part.w);
      }
    }
    std::uint32_t words[2][4];  // of rows 8 apart
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      words[0][n] = pack<Element>(four[n].x * scale, four[n].y * scale);
      words[1][n] = pack<Element>(four[n].z * scale, four[n].w * scale);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      transpose_quad(words[half]);
      if (row + 8 * half >= params.rows) continue;
      store_piece(target + 8 * half * dquery.token_stride, first + lane % 4, words[half], params.head_dim,
                  params.aligned);
    }
  }
}

}  // namespace

cudaError_t launch_query_gradients(const BackwardProblem& problem, const BackwardParams& params, cudaStream_t stream) {
  return by_type(problem, [&]<typename Element, int kHeadDim>() {
    if constexpr (has_backward(kHeadDim)) {
      const std::int64_t blocks = row_parts<kHeadDim>(problem.rows) * problem.heads * problem.batch;
      return launch_blocks(query_gradient_kernel<Element, kHeadDim>,
                           {.blocks = blocks, .threads = kWarpGroup, .is_dependent = true}, stream, params);
    } else {
      return cudaErrorInvalidValue;  // takes_backward declines
    }
  });
}

}  // namespace flash_dmattn::internal::cuda::sm90
