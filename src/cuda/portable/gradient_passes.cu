// What surrounds the backward kernel: facts of rows before it, and after it the rounding of fp32 sums into gradients.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/portable/backward_config.h"
#include "cuda/portable/buckets.h"
#include "cuda/portable/launch.h"
#include "cuda/portable/tokens.cuh"
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
template <typename Element, int kLanes, typename Index>
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
    // Divisions of 64 bits would take longer than everything else.
    const auto position = static_cast<Index>(index), heads = static_cast<Index>(problem.heads);
    const std::int64_t head = position % heads;
    const std::int64_t row = position / heads % static_cast<Index>(padded_rows);
    const std::int64_t batch = position / heads / static_cast<Index>(padded_rows);
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
  const auto launch = [&](auto small, auto large, int lanes) {
    // A round past the last row is computed too, and must not wrap around.
    (rows < 1ll << 31 ? small : large)<<<blocks_for(rows * lanes), kThreads, 0, stream>>>(problem, padded_rows, facts);
    return cudaGetLastError();
  };
  using Small = std::uint32_t;
  using Large = std::uint64_t;
  if (problem.head_dim <= 32)
    return launch(row_facts_kernel<Element, 4, Small>, row_facts_kernel<Element, 4, Large>, 4);
  if (problem.head_dim <= 64)
    return launch(row_facts_kernel<Element, 8, Small>, row_facts_kernel<Element, 8, Large>, 8);
  if (problem.head_dim <= 128) {
    return launch(row_facts_kernel<Element, 16, Small>, row_facts_kernel<Element, 16, Large>, 16);
  }
  return launch(row_facts_kernel<Element, 32, Small>, row_facts_kernel<Element, 32, Large>, 32);
}

// One block a tile of rows, in the order in which backward_kernel's threads left their registers; through shared
// memory, so that whole rows are written.
template <typename Element, int kHeadDim, bool kNarrow>
__global__ void __launch_bounds__(BackwardConfig<kHeadDim, kNarrow>::kThreads)
    query_gradient_kernel(const __grid_constant__ BackwardProblem problem, const float* sums) {
  using Config = BackwardConfig<kHeadDim, kNarrow>;
  using Tile = SharedTile<kHeadDim>;
  constexpr int kQueryRows = Config::kRows / Config::kQueryRowWarps;
  constexpr int kQueryDims = kHeadDim * Config::kQueryRowWarps / Config::kWarps;
  __shared__ __align__(1024) unsigned char shared[Config::kRowBytes];
  const Tile tile{shared_address(shared)};
  const int row_tiles = static_cast<int>((problem.rows + Config::kRows - 1) / Config::kRows);
  const int first_row = static_cast<int>(blockIdx.x) % row_tiles * Config::kRows;
  const std::int64_t pair = blockIdx.x / static_cast<unsigned>(row_tiles);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int lane_row = warp % Config::kQueryRowWarps * kQueryRows + lane / 4;
  const int first_piece = warp / Config::kQueryRowWarps * kQueryDims / 8;
  const auto* source =
      reinterpret_cast<const float4*>(sums + static_cast<std::int64_t>(blockIdx.x) * Config::kRows * kHeadDim);
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
  for (int index = static_cast<int>(threadIdx.x); index < Config::kRows * Tile::kPieces; index += Config::kThreads) {
    const int row = index / Tile::kPieces, piece = index % Tile::kPieces;
    if (first_row + row >= problem.rows) continue;
    std::uint32_t words[4];
    load_shared_16(words, tile.piece(row, piece));
    store_piece(target + (first_row + row) * problem.dquery.token_stride, piece, words, head_dim, aligned);
  }
}

template <typename Element, int kHeadDim, bool kNarrow>
cudaError_t query_gradients_of(const BackwardProblem& problem, const float* sums, cudaStream_t stream) {
  using Config = BackwardConfig<kHeadDim, kNarrow>;
  const std::int64_t tiles = (problem.rows + Config::kRows - 1) / Config::kRows * problem.heads * problem.batch;
  query_gradient_kernel<Element, kHeadDim, kNarrow>
      <<<static_cast<unsigned>(tiles), Config::kThreads, 0, stream>>>(problem, sums);
  return cudaGetLastError();
}

// What is rounded: the sum over colors of sums[color][row][column].
struct ColoredSums {
  const float* sums;
  std::int64_t rows;
  int stride, width;  // a row has `width` columns, and begins `stride` after the last
  int colors;
  // Rows are (batches, keys, heads); those of `stored` heads (batches, heads) are left out. Null: none.
  const std::uint8_t* stored = nullptr;
  std::int64_t batch_rows = 0;
  int heads = 1;

  __host__ __device__ std::int64_t color_stride() const { return rows * stride; }
  // Index: an unsigned integer that holds all rows; 64-bit divisions are slow.
  template <typename Index>
  __device__ bool leaves_out(Index row) const {
    return stored[row / static_cast<Index>(batch_rows) * static_cast<Index>(heads) + row % static_cast<Index>(heads)] !=
           0;
  }
};

template <typename Element>
__global__ void round_kernel(const __grid_constant__ ColoredSums sums, Element* result) {
  const std::int64_t count = sums.rows * sums.width;
  for (std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; index < count;
       index += static_cast<std::int64_t>(gridDim.x) * kThreads) {
    if (sums.stored != nullptr && sums.leaves_out(static_cast<std::uint64_t>(index / sums.width))) continue;
    const float* place = sums.sums + index / sums.width * sums.stride + index % sums.width;
    float sum = 0;
    for (int color = 0; color < sums.colors; ++color) sum += place[color * sums.color_stride()];
    result[index] = static_cast<Element>(sum);
  }
}

// The same where nothing lies between rows, eight at a time.
template <typename Element>
__global__ void round_eight_kernel(const __grid_constant__ ColoredSums sums, std::int64_t eights, uint4* result) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= eights) return;
  if (sums.stored != nullptr && sums.leaves_out(static_cast<std::uint32_t>(index) / (sums.width / 8u))) return;
  float sum[8] = {};
  for (int color = 0; color < sums.colors; ++color) {
    const auto* place = reinterpret_cast<const float4*>(sums.sums + color * sums.color_stride()) + 2 * index;
    const float4 low = __ldcs(place), high = __ldcs(place + 1);
    const float parts[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += parts[i];
  }
  result[index] = make_uint4(pack<Element>(sum[0], sum[1]), pack<Element>(sum[2], sum[3]),
                             pack<Element>(sum[4], sum[5]), pack<Element>(sum[6], sum[7]));
}

template <typename Element>
cudaError_t round_sums_to(const ColoredSums& sums, Element* result, cudaStream_t stream) {
  const std::int64_t eights = sums.rows * sums.width / 8, blocks = (eights + kThreads - 1) / kThreads;
  if constexpr (sizeof(Element) == 2) {
    // With a width that is no multiple of eight, eight elements may belong to two rows.
    const bool knows_rows = sums.stored == nullptr || (sums.width % 8 == 0 && eights <= 0xffffffff);
    if (sums.stride == sums.width && sums.rows * sums.width % 8 == 0 && knows_rows &&
        reinterpret_cast<std::uintptr_t>(result) % 16 == 0 && blocks <= 0x7fffffff) {
      round_eight_kernel<Element>
          <<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(sums, eights, reinterpret_cast<uint4*>(result));
      return cudaGetLastError();
    }
  }
  round_kernel<<<blocks_for(sums.rows * sums.width), kThreads, 0, stream>>>(sums, result);
  return cudaGetLastError();
}

cudaError_t round_sums(const ColoredSums& sums, DType dtype, void* result, cudaStream_t stream) {
  if (sums.rows * sums.width == 0) return cudaSuccess;
  if (dtype == DType::kBFloat16) return round_sums_to(sums, static_cast<__nv_bfloat16*>(result), stream);
  if (dtype == DType::kFloat16) return round_sums_to(sums, static_cast<__half*>(result), stream);
  return round_sums_to(sums, static_cast<float*>(result), stream);
}

// One thread adds up, in one order, all that belongs to an entry of dbias: colors, batch elements, heads and keys.
template <typename Element>
__global__ void shared_bias_kernel(const __grid_constant__ BackwardProblem problem, const float* sums, int colors,
                                   Element* result) {
  const BroadcastView& dbias = problem.dbias;
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= dbias.batches * dbias.heads * dbias.keys) return;
  const std::int64_t entry_key = index % dbias.keys, entry_head = index / dbias.keys % dbias.heads;
  const std::int64_t entry_batch = index / dbias.keys / dbias.heads;
  const std::int64_t batches = problem.batch / dbias.batches, keys = problem.keys / dbias.keys;
  float sum = 0;
  for (int color = 0; color < colors; ++color) {
    for (std::int64_t batch = entry_batch * batches; batch < (entry_batch + 1) * batches; ++batch) {
      for (std::int64_t head = entry_head * dbias.head_divisor; head < (entry_head + 1) * dbias.head_divisor; ++head) {
        const float* place = sums + ((color * problem.batch + batch) * problem.heads + head) * problem.keys;
        for (std::int64_t key = entry_key * keys; key < (entry_key + 1) * keys; ++key) sum += place[key];
      }
    }
  }
  result[index] = static_cast<Element>(sum);
}

}  // namespace

template <int kHeadDim, bool kNarrow>
constexpr BackwardTiles tiles_of() {
  return {BackwardConfig<kHeadDim, kNarrow>::kRows, BackwardConfig<kHeadDim, kNarrow>::kKeys};
}

BackwardTiles backward_tiles(int head_dim, std::size_t shared_limit) {
  return with_bucket(head_dim, [&]<int kHeadDim>() {
    return is_narrow(shared_limit) ? tiles_of<kHeadDim, true>() : tiles_of<kHeadDim, false>();
  });
}

cudaError_t launch_row_facts(const BackwardProblem& problem, std::int64_t padded_rows, RowFacts* facts,
                             cudaStream_t stream) {
  return problem.dtype == DType::kBFloat16 ? row_facts_of<__nv_bfloat16>(problem, padded_rows, facts, stream)
                                           : row_facts_of<__half>(problem, padded_rows, facts, stream);
}

template <typename Element>
cudaError_t query_gradients_by_bucket(const BackwardProblem& problem, std::size_t shared_limit, const float* sums,
                                      cudaStream_t stream) {
  return with_bucket(problem.head_dim, [&]<int kHeadDim>() {
    return is_narrow(shared_limit) ? query_gradients_of<Element, kHeadDim, true>(problem, sums, stream)
                                   : query_gradients_of<Element, kHeadDim, false>(problem, sums, stream);
  });
}

cudaError_t launch_query_gradients(const BackwardProblem& problem, std::size_t shared_limit, const float* sums,
                                   cudaStream_t stream) {
  return problem.dtype == DType::kBFloat16
             ? query_gradients_by_bucket<__nv_bfloat16>(problem, shared_limit, sums, stream)
             : query_gradients_by_bucket<__half>(problem, shared_limit, sums, stream);
}

cudaError_t launch_key_gradients(const BackwardProblem& problem, const float* sums, int colors,
                                 const std::uint8_t* stored, const TokenView& gradient, cudaStream_t stream) {
  const std::int64_t batch_rows = problem.keys * problem.key_heads;
  const ColoredSums colored = {.sums = sums,
                               .rows = problem.batch * batch_rows,
                               .stride = bucket_of(static_cast<int>(problem.head_dim)),
                               .width = static_cast<int>(problem.head_dim),
                               .colors = colors,
                               .stored = stored,
                               .batch_rows = batch_rows,
                               .heads = static_cast<int>(problem.key_heads)};
  return round_sums(colored, problem.dtype, gradient.data, stream);
}

cudaError_t launch_bias_gradients(const float* sums, std::int64_t count, DType dtype, void* gradient,
                                  cudaStream_t stream) {
  return round_sums({sums, count, 1, 1, 1}, dtype, gradient, stream);
}

cudaError_t launch_shared_bias_gradients(const BackwardProblem& problem, const float* sums, int colors,
                                         cudaStream_t stream) {
  const BroadcastView& dbias = problem.dbias;
  const std::int64_t blocks = (dbias.batches * dbias.heads * dbias.keys + kThreads - 1) / kThreads;
  const auto launch = [&](auto* result) {
    shared_bias_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(problem, sums, colors, result);
    return cudaGetLastError();
  };
  if (blocks == 0) return cudaSuccess;
  if (dbias.dtype == DType::kBFloat16) return launch(static_cast<__nv_bfloat16*>(dbias.data));
  if (dbias.dtype == DType::kFloat16) return launch(static_cast<__half*>(dbias.data));
  return launch(static_cast<float*>(dbias.data));
}

}  // namespace flash_dmattn::internal::cuda
