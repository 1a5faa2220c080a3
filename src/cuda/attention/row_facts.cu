#include "cuda/attention/row_facts.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/attention/met_once.cuh"
#include "cuda/attention/row_facts.cuh"
#include "cuda/attention/sinks.cuh"
#include "cuda/launch_blocks.cuh"
#include "cuda/ptx/dependent_launch.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kThreads = 256;

template <typename Element>
__device__ float to_float(std::uint16_t bits) {
  return static_cast<float>(*reinterpret_cast<const Element*>(&bits));
}

// A sink's part in a row's facts. The keys have a share of the softmax sum with it, which makes P' = share * P of their
// probabilities P. As out has shrunk by the share, too, gradients of scores are P' * (dP - delta) as without a sink,
// and the gradient by lse, which leaves the sink out and adds P * dlse to them, is divided by the share to meet P'.
// Row `row` of all (B, H, Sq) gets lse and dlse as they are then; `part` is what it adds to the sink's gradient, or
// null.
template <typename Element>
__device__ void add_sink(const BackwardProblem& problem, const RowPass& pass, int head, std::int64_t row, float delta,
                         float* part, float& lse, float& dlse) {
  // dlse / share and P' both stay in float's range down to here. Smaller shares are taken for this one, which leaves no
  // more of them for dV.
  constexpr float kMostLogGrowth = 100 * kLn2;
  const auto* given = static_cast<const RowStats*>(problem.row_stats);
  const RowStats stats = given != nullptr ? given[row] : make_float2(0, 0);
  const float sink = load_sink<Element>(problem.sink, head);
  const float highest = given != nullptr ? __fmul_rn(stats.x, pass.natural) : lse;
  const float distance = sink_distance(sink, highest, stats.y);
  if (part != nullptr) *part = sink == -INFINITY ? 0 : -sink_share(distance) * delta;
  float log_growth = log_sum_growth(distance);  // the logarithm of 1 / share
  if (dlse != 0) {
    if (log_growth > kMostLogGrowth) log_growth = kMostLogGrowth;  // unlike fminf this keeps NaN
    dlse *= __expf(log_growth);
  }
  lse += log_growth;
  if (pass.stats != nullptr) pass.stats[row] = make_float2(stats.x, stats.y + log_growth);
}

// The products of a thread's eight columns of two rows, added up.
template <typename Element>
__device__ float dot(const std::uint32_t (&left)[4], const std::uint32_t (&right)[4]) {
  float sum = 0;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    sum += to_float<Element>(static_cast<std::uint16_t>(left[word])) *
           to_float<Element>(static_cast<std::uint16_t>(right[word]));
    sum += to_float<Element>(static_cast<std::uint16_t>(left[word] >> 16)) *
           to_float<Element>(static_cast<std::uint16_t>(right[word] >> 16));
  }
  return sum;
}

// Eight columns of a row, of which `columns` exist: as packed words. kOnce: nobody reads the row again.
template <bool kOnce>
__device__ inline void load_columns(const std::uint16_t* row, int columns, bool aligned, std::uint32_t (&words)[4]) {
  if (aligned && columns >= 8) {
    const auto* piece = reinterpret_cast<const uint4*>(row);
    const uint4 all = kOnce ? __ldcs(piece) : *piece;
    words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
    return;
  }
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const std::uint32_t low = 2 * word < columns ? row[2 * word] : 0;
    const std::uint32_t high = 2 * word + 1 < columns ? row[2 * word + 1] : 0;
    words[word] = low | high << 16;
  }
}

// Stores a row's facts and what it adds to its sink's gradient; `sum`: of the products of out and dout.
template <typename Element>
__device__ void store_facts(const BackwardProblem& problem, const RowPass& pass, int batch, int head, std::int64_t row,
                            float sum, RowFacts* fact) {
  const bool exists = row < problem.rows;
  const std::int64_t own = (batch * problem.heads + head) * problem.rows + row;
  float lse = exists ? static_cast<const float*>(problem.lse)[own] : -INFINITY;
  const bool sees = lse != -INFINITY;
  const bool wants_part = exists && pass.sink_parts != nullptr;
  float* part = wants_part ? pass.sink_parts + (head * problem.batch + batch) * problem.rows + row : nullptr;
  float dlse = 0;
  if (sees && problem.dlse != nullptr) {
    dlse = static_cast<const float*>(problem.dlse)[batch * problem.dlse_batch_stride + head * problem.dlse_head_stride +
                                                   row * problem.dlse_row_stride];
  }
  if (sees && problem.sink.defined()) {
    add_sink<Element>(problem, pass, head, own, sum, part, lse, dlse);
  } else if (part != nullptr) {
    *part = 0;
  }
  const float lse_log2 = sees ? row_fact_of_lse(lse, problem.row_stats != nullptr) : INFINITY;
  if (is_large_row(lse_log2)) pass.flags->has_large_row = 1;
  if (exists && !sees) pass.flags->has_unseen_row = 1;
  fact[0] = lse_log2;
  fact[pass.row_tile] = sees ? sum - dlse : 0;
}

// A block makes the facts of a tile of rows, and clears the tile's sums, if it has any. A row is read by kLanes
// neighbouring lanes. From the last head to the first, so that the cache still has rows and sums of those that the
// kernel after it begins with.
template <typename Element, int kLanes>
__global__ void __launch_bounds__(kThreads)
    row_facts_kernel(const __grid_constant__ BackwardProblem problem, const __grid_constant__ RowPass pass) {
  constexpr int kRows = kThreads / kLanes;  // at a time
  if (!pass.beside) wait_for_kernels_before();
  let_next_kernel_begin();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kLanes;
  // 32 bits: divisions of 64 take long.
  const auto heads = static_cast<unsigned>(problem.heads);
  const auto tiles = static_cast<unsigned>((problem.rows + pass.row_tile - 1) / pass.row_tile);
  const unsigned number = gridDim.x - 1 - blockIdx.x;  // of the tile, of all
  const int tile = static_cast<int>(number % tiles), head = static_cast<int>(number / tiles % heads),
            batch = static_cast<int>(number / tiles / heads);
  const int first_row = tile * pass.row_tile, columns = static_cast<int>(problem.value_dim) - lane * 8;
  const auto at = [&](const TokenView& tokens) {
    return static_cast<const std::uint16_t*>(tokens.data) + batch * tokens.batch_stride + head * tokens.head_stride +
           lane * 8;
  };
  const std::uint16_t *outs = at(problem.out), *douts = at(problem.dout);
  const auto has_pieces = [](const TokenView& tokens, const std::uint16_t* row) {
    return reinterpret_cast<std::uintptr_t>(row) % 16 == 0 && tokens.token_stride % 8 == 0;
  };
  const bool aligned = has_pieces(problem.out, outs) && has_pieces(problem.dout, douts);
  const auto clear_sums = [&] {
    if (pass.query_sums == nullptr || stores_tile(pass.met_once, pass.plan, batch, head, first_row)) return;
    for (int color = 0; color < pass.query_sum_colors; ++color) {
      const std::int64_t sum_tile = std::int64_t{color} * gridDim.x + number;
      auto* sums = reinterpret_cast<float4*>(pass.query_sums + sum_tile * pass.row_tile * pass.sum_width);
      for (int piece = thread; piece < pass.row_tile * pass.sum_width / 4; piece += kThreads) {
        sums[piece] = make_float4(0, 0, 0, 0);
      }
    }
  };
  if (thread / kLanes >= pass.row_tile) clear_sums();
  // A few rows at a time, so that many loads are under way.
  constexpr int kTogether = 4;
  for (int round = thread / kLanes; round < pass.row_tile; round += kTogether * kRows) {
    std::uint32_t out[kTogether][4] = {}, dout[kTogether][4] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int row = first_row + round + i * kRows;
      if (round + i * kRows >= pass.row_tile || row >= problem.rows || columns <= 0) continue;
      load_columns<true>(outs + row * problem.out.token_stride, columns, aligned, out[i]);
      load_columns<false>(douts + row * problem.dout.token_stride, columns, aligned, dout[i]);
    }
    if (round < kRows) clear_sums();  // while the first ones are under way
    // Of the rows whose columns a few lanes have added up together, a lane each makes the facts.
    static_assert(kTogether <= kLanes);
    float own_sum = 0;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      float sum = dot<Element>(out[i], dout[i]);
#pragma unroll
      for (int distance = kLanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
      if (lane == i) own_sum = sum;
    }
    const int row = round + lane * kRows;
    if (lane >= kTogether || row >= pass.row_tile) continue;
    store_facts<Element>(problem, pass, batch, head, first_row + row, own_sum,
                         pass.facts + std::int64_t{number} * 2 * pass.row_tile + row);
  }
  end_dependent_kernel();
}

template <typename Element>
cudaError_t row_facts_of(const BackwardProblem& problem, const RowPass& pass, cudaStream_t stream) {
  const std::int64_t tiles = (problem.rows + pass.row_tile - 1) / pass.row_tile;
  const auto launch = [&](auto kernel) {
    const LaunchShape shape = {
        .blocks = problem.batch * problem.heads * tiles, .threads = kThreads, .is_dependent = true};
    return launch_blocks(kernel, shape, stream, problem, pass);
  };
  if (problem.value_dim <= 32) return launch(row_facts_kernel<Element, 4>);
  if (problem.value_dim <= 64) return launch(row_facts_kernel<Element, 8>);
  if (problem.value_dim <= 128) return launch(row_facts_kernel<Element, 16>);
  return launch(row_facts_kernel<Element, 32>);
}

// A block adds up what all rows have for one sink.
constexpr int kSumThreads = 1024;

template <typename Result>
__global__ void sink_gradients_kernel(const float* sink_parts, std::int64_t rows, Result* gradients) {
  __shared__ float warp_sums[kSumThreads / 32];
  const int thread = static_cast<int>(threadIdx.x);
  const float* parts = sink_parts + blockIdx.x * rows;
  float sum = 0;
#pragma unroll 4
  for (std::int64_t row = thread; row < rows; row += kSumThreads) sum += parts[row];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  if (thread % 32 == 0) warp_sums[thread / 32] = sum;
  __syncthreads();
  if (thread != 0) return;
  float total = 0;
  for (const float warp_sum : warp_sums) total += warp_sum;
  gradients[blockIdx.x] = static_cast<Result>(total);
}

}  // namespace

cudaError_t launch_row_facts(const BackwardProblem& problem, const RowPass& pass, cudaStream_t stream) {
  return problem.dtype == DType::kBFloat16 ? row_facts_of<__nv_bfloat16>(problem, pass, stream)
                                           : row_facts_of<__half>(problem, pass, stream);
}

cudaError_t launch_sink_gradients(const BackwardProblem& problem, const float* sink_parts, cudaStream_t stream) {
  const auto launch = [&](auto* gradients) {
    return launch_blocks(sink_gradients_kernel<std::remove_pointer_t<decltype(gradients)>>,
                         {problem.heads, kSumThreads}, stream, sink_parts, problem.batch * problem.rows, gradients);
  };
  const HeadView& dsink = problem.dsink;
  if (dsink.dtype == DType::kBFloat16) return launch(static_cast<__nv_bfloat16*>(dsink.data));
  if (dsink.dtype == DType::kFloat16) return launch(static_cast<__half*>(dsink.data));
  return launch(static_cast<float*>(dsink.data));
}

}  // namespace flash_dmattn::internal::cuda
