#include "cuda/attention/row_facts.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/attention/row_facts.cuh"
#include "cuda/attention/sinks.cuh"
#include "cuda/launch_blocks.cuh"

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

// A row is read by kLanes neighbouring lanes.
template <typename Element, int kLanes, typename Index>
__global__ void row_facts_kernel(const __grid_constant__ BackwardProblem problem, const __grid_constant__ RowPass pass,
                                 std::int64_t padded_rows) {
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
    const std::int64_t own = (batch * problem.heads + head) * problem.rows + row;
    float lse = -INFINITY;
    if (exists) lse = static_cast<const float*>(problem.lse)[own];
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
    const bool wants_part = exists && pass.sink_parts != nullptr;
    float* part = wants_part ? pass.sink_parts + (head * problem.batch + batch) * problem.rows + row : nullptr;
    float dlse = 0;
    if (sees && problem.dlse != nullptr) {
      dlse = static_cast<const float*>(problem.dlse)[batch * problem.dlse_batch_stride +
                                                     head * problem.dlse_head_stride + row * problem.dlse_row_stride];
    }
    if (sees && problem.sink.defined()) {
      add_sink<Element>(problem, pass, static_cast<int>(head), own, sum, part, lse, dlse);
    } else if (part != nullptr) {
      *part = 0;
    }
    const float lse_log2 = sees ? row_fact_of_lse(lse, problem.row_stats != nullptr) : INFINITY;
    if (is_large_row(lse_log2)) pass.flags->has_large_row = 1;
    if (exists && !sees) pass.flags->has_unseen_row = 1;
    RowFacts* fact = pass.facts + 2 * (batch * problem.heads + head) * padded_rows + row_fact(row, pass.row_tile);
    fact[0] = lse_log2;
    fact[pass.row_tile] = sees ? sum - dlse : 0;
  }
}

template <typename Element>
cudaError_t row_facts_of(const BackwardProblem& problem, const RowPass& pass, cudaStream_t stream) {
  const std::int64_t padded_rows = (problem.rows + pass.row_tile - 1) / pass.row_tile * pass.row_tile;
  const std::int64_t rows = problem.batch * padded_rows * problem.heads;
  const auto launch = [&](auto small, auto large, int lanes) {
    constexpr std::int64_t kMostBlocks = 1 << 20;  // the kernel strides over what is left
    const std::int64_t blocks = std::min((rows * lanes + kThreads - 1) / kThreads, kMostBlocks);
    // A round past the last row is computed too, and must not wrap around.
    return launch_blocks(rows < 1ll << 31 ? small : large, {blocks, kThreads}, stream, problem, pass, padded_rows);
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
