// What surrounds the backward kernel: facts of rows before it, and after it the rounding of fp32 sums into gradients.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/portable/backward_config.h"
#include "cuda/portable/launch.h"
#include "cuda/ptx/mma.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kThreads = 256;

unsigned blocks_for(std::int64_t threads) {
  constexpr std::int64_t kMost = 1 << 20;  // kernels below stride over what is left
  return static_cast<unsigned>(std::clamp<std::int64_t>((threads + kThreads - 1) / kThreads, 1, kMost));
}

template <typename Element>
__device__ float to_float(std::uint16_t bits) {
  return static_cast<float>(*reinterpret_cast<const Element*>(&bits));
}

// kLanes neighbouring lanes share a row.
template <typename Element, int kLanes>
__global__ void row_facts_kernel(const __grid_constant__ BackwardProblem problem, std::int64_t padded_rows,
                                 RowFacts* facts) {
  const std::int64_t rows = problem.batch * padded_rows * problem.heads;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t first = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads / kLanes;
  // All lanes of a warp make the same number of rounds, so that they can trade their parts.
  const std::int64_t warp_first = first - (threadIdx.x % 32) / kLanes;
  for (std::int64_t round = 0; warp_first + round < rows; round += step) {
    const std::int64_t index = first + round;
    const std::int64_t head = index % problem.heads, row = index / problem.heads % padded_rows;
    const std::int64_t batch = index / problem.heads / padded_rows;
    const bool exists = index < rows && row < problem.rows;
    float lse = -INFINITY;
    if (exists) lse = static_cast<const float*>(problem.lse)[(batch * problem.heads + head) * problem.rows + row];
    const bool sees = lse != -INFINITY;
    const auto at = [&](const TokenView& tokens) {
      return static_cast<const std::uint16_t*>(tokens.data) + batch * tokens.batch_stride + row * tokens.token_stride +
             head * tokens.head_stride;
    };
    const std::uint16_t *out = at(problem.out), *dout = at(problem.dout);
    float sum = 0;
    const bool aligned = problem.head_dim % 8 == 0 && reinterpret_cast<std::uintptr_t>(out) % 16 == 0 &&
                         reinterpret_cast<std::uintptr_t>(dout) % 16 == 0;
    for (int column = lane * 8; sees && column < problem.head_dim; column += kLanes * 8) {
      if (aligned) {
        const uint4 a = *reinterpret_cast<const uint4*>(out + column),
                    b = *reinterpret_cast<const uint4*>(dout + column);
        const std::uint32_t left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int word = 0; word < 4; ++word) {
          sum += to_float<Element>(static_cast<std::uint16_t>(left[word])) *
                 to_float<Element>(static_cast<std::uint16_t>(right[word]));
          sum += to_float<Element>(static_cast<std::uint16_t>(left[word] >> 16)) *
                 to_float<Element>(static_cast<std::uint16_t>(right[word] >> 16));
        }
      } else {
        for (int element = column; element < min(column + 8, static_cast<int>(problem.head_dim)); ++element) {
          sum += to_float<Element>(out[element]) * to_float<Element>(dout[element]);
        }
      }
    }
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane != 0 || index >= rows) continue;
    if (sees && problem.dlse != nullptr) {
      sum -= static_cast<const float*>(problem.dlse)[batch * problem.dlse_batch_stride +
                                                     head * problem.dlse_head_stride + row * problem.dlse_row_stride];
    }
    constexpr float kLog2E = 1.4426950408889634f;
    facts[(batch * problem.heads + head) * padded_rows + row] =
        sees ? make_float2(lse * kLog2E, sum) : make_float2(INFINITY, 0);
  }
}

template <typename Element>
cudaError_t row_facts_of(const BackwardProblem& problem, std::int64_t padded_rows, RowFacts* facts,
                         cudaStream_t stream) {
  const std::int64_t rows = problem.batch * padded_rows * problem.heads;
  const auto launch = [&](auto kernel, int lanes) {
    kernel<<<blocks_for(rows * lanes), kThreads, 0, stream>>>(problem, padded_rows, facts);
    return cudaGetLastError();
  };
  if (problem.head_dim <= 32) return launch(row_facts_kernel<Element, 4>, 4);
  if (problem.head_dim <= 64) return launch(row_facts_kernel<Element, 8>, 8);
  if (problem.head_dim <= 128) return launch(row_facts_kernel<Element, 16>, 16);
  return launch(row_facts_kernel<Element, 32>, 32);
}

// One block a tile of rows, in the order in which backward_kernel's threads left their registers.
template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(BackwardConfig<kHeadDim>::kThreads)
    query_gradient_kernel(const __grid_constant__ BackwardProblem problem, const float* sums) {
  using Config = BackwardConfig<kHeadDim>;
  constexpr int kQueryRows = Config::kRows / Config::kQueryRowWarps;
  constexpr int kQueryDims = kHeadDim * Config::kQueryRowWarps / Config::kWarps;
  const int row_tiles = static_cast<int>((problem.rows + Config::kRows - 1) / Config::kRows);
  const int tile = static_cast<int>(blockIdx.x) % row_tiles;
  const std::int64_t pair = blockIdx.x / static_cast<unsigned>(row_tiles);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first_row = tile * Config::kRows + warp % Config::kQueryRowWarps * kQueryRows + lane / 4;
  const int first_column = warp / Config::kQueryRowWarps * kQueryDims + lane % 4 / 2 * 4;
  const auto* source =
      reinterpret_cast<const float4*>(sums + static_cast<std::int64_t>(blockIdx.x) * Config::kRows * kHeadDim);
  auto* target = static_cast<std::uint16_t*>(problem.dquery.data) + pair / problem.heads * problem.dquery.batch_stride +
                 pair % problem.heads * problem.dquery.head_stride;
  const float scale = static_cast<float>(problem.scale);
#pragma unroll
  for (int m = 0; m < kQueryRows / 16; ++m)
#pragma unroll
    for (int n = 0; n < kQueryDims / 8; ++n) {
      const float4 part = source[(m * (kQueryDims / 8) + n) * Config::kThreads + threadIdx.x];
      // Neighbouring lanes trade halves, so that each has four columns of one row.
      const bool odd = lane % 2 != 0;
      const float first = __shfl_xor_sync(~0u, odd ? part.x : part.z, 1);
      const float second = __shfl_xor_sync(~0u, odd ? part.y : part.w, 1);
      const int row = first_row + m * 16 + (odd ? 8 : 0), column = first_column + n * 8;
      const std::uint32_t low =
          odd ? pack<Element>(first * scale, second * scale) : pack<Element>(part.x * scale, part.y * scale);
      const std::uint32_t high =
          odd ? pack<Element>(part.z * scale, part.w * scale) : pack<Element>(first * scale, second * scale);
      if (row >= problem.rows) continue;
      std::uint16_t* place = target + row * problem.dquery.token_stride + column;
      if (problem.head_dim % 4 == 0) {
        if (column < problem.head_dim) *reinterpret_cast<uint2*>(place) = make_uint2(low, high);
      } else {
        const std::uint32_t words[2] = {low, high};
#pragma unroll
        for (int element = 0; element < 4; ++element) {
          if (column + element < problem.head_dim) {
            place[element] = static_cast<std::uint16_t>(words[element / 2] >> (16 * (element % 2)));
          }
        }
      }
    }
}

template <typename Element, int kHeadDim>
cudaError_t query_gradients_of(const BackwardProblem& problem, const float* sums, cudaStream_t stream) {
  using Config = BackwardConfig<kHeadDim>;
  const std::int64_t tiles = (problem.rows + Config::kRows - 1) / Config::kRows * problem.heads * problem.batch;
  query_gradient_kernel<Element, kHeadDim>
      <<<static_cast<unsigned>(tiles), Config::kThreads, 0, stream>>>(problem, sums);
  return cudaGetLastError();
}

// Rows of `stride` sums to rows of `width` elements.
template <typename Element>
__global__ void round_kernel(const float* sums, std::int64_t rows, int stride, int width, Element* result) {
  const std::int64_t count = rows * width;
  for (std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < count;
       index += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    result[index] = static_cast<Element>(sums[index / width * stride + index % width]);
  }
}

cudaError_t round_sums(const float* sums, std::int64_t rows, int stride, int width, DType dtype, void* result,
                       cudaStream_t stream) {
  const unsigned blocks = blocks_for(rows * width);
  const auto launch = [&](auto kernel, auto* typed) {
    kernel<<<blocks, kThreads, 0, stream>>>(sums, rows, stride, width, typed);
    return cudaGetLastError();
  };
  if (dtype == DType::kBFloat16) return launch(round_kernel<__nv_bfloat16>, static_cast<__nv_bfloat16*>(result));
  if (dtype == DType::kFloat16) return launch(round_kernel<__half>, static_cast<__half*>(result));
  return launch(round_kernel<float>, static_cast<float*>(result));
}

}  // namespace

template <int kHeadDim>
constexpr BackwardTiles tiles_of() {
  return {BackwardConfig<kHeadDim>::kRows, BackwardConfig<kHeadDim>::kKeys};
}

BackwardTiles backward_tiles(int head_dim) {
  switch (bucket_of(head_dim)) {
    case 32:
      return tiles_of<32>();
    case 64:
      return tiles_of<64>();
    case 96:
      return tiles_of<96>();
    case 128:
      return tiles_of<128>();
    case 192:
      return tiles_of<192>();
    default:
      return tiles_of<256>();
  }
}

cudaError_t launch_row_facts(const BackwardProblem& problem, std::int64_t padded_rows, RowFacts* facts,
                             cudaStream_t stream) {
  return problem.dtype == DType::kBFloat16 ? row_facts_of<__nv_bfloat16>(problem, padded_rows, facts, stream)
                                           : row_facts_of<__half>(problem, padded_rows, facts, stream);
}

template <typename Element>
cudaError_t query_gradients_by_bucket(const BackwardProblem& problem, const float* sums, cudaStream_t stream) {
  switch (bucket_of(static_cast<int>(problem.head_dim))) {
    case 32:
      return query_gradients_of<Element, 32>(problem, sums, stream);
    case 64:
      return query_gradients_of<Element, 64>(problem, sums, stream);
    case 96:
      return query_gradients_of<Element, 96>(problem, sums, stream);
    case 128:
      return query_gradients_of<Element, 128>(problem, sums, stream);
    case 192:
      return query_gradients_of<Element, 192>(problem, sums, stream);
    default:
      return query_gradients_of<Element, 256>(problem, sums, stream);
  }
}

cudaError_t launch_query_gradients(const BackwardProblem& problem, const float* sums, cudaStream_t stream) {
  return problem.dtype == DType::kBFloat16 ? query_gradients_by_bucket<__nv_bfloat16>(problem, sums, stream)
                                           : query_gradients_by_bucket<__half>(problem, sums, stream);
}

cudaError_t launch_key_gradients(const BackwardProblem& problem, const float* sums, const TokenView& gradient,
                                 cudaStream_t stream) {
  return round_sums(sums, problem.batch * problem.keys * problem.key_heads,
                    bucket_of(static_cast<int>(problem.head_dim)), static_cast<int>(problem.head_dim), problem.dtype,
                    gradient.data, stream);
}

cudaError_t launch_bias_gradients(const float* sums, std::int64_t count, DType dtype, void* gradient,
                                  cudaStream_t stream) {
  return round_sums(sums, count, 1, 1, dtype, gradient, stream);
}

}  // namespace flash_dmattn::internal::cuda
