// Puts together what the warps of a block have and, where splits are the blocks of a cluster, what these have.
#pragma once

#include <cstdint>

#include "cuda/attention/softmax.cuh"
#include "cuda/decode/combine.cuh"
#include "cuda/decode/config.h"
#include "cuda/decode/decode_block.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/dependent_launch.cuh"

namespace flash_dmattn::internal::cuda {

// A row of the block, relative to all results.
struct ResultRow {
  int head, row;
  std::int64_t number;

  __device__ ResultRow(const DecodeParams& params, const DecodeBlock& block, int m)
      : head(block.head(m)),
        row(block.row(m)),
        number((static_cast<std::int64_t>(block.batch) * params.heads + head) * params.rows + row) {}
};

// By the blocks of a cluster, each of which has one split of the same rows: sums of a row at `sums` + `pitch` floats a
// row, and the rows' facts, in its shared memory. Every block adds up a share of the results, and stores them.
template <typename Element, int kHeadDim>
__device__ inline void merge_cluster(const DecodeParams& params, const DecodeBlock& block, const float* sums, int pitch,
                                     const float2* facts) {
  constexpr int kBatch = 8;  // splits that are read at the same time
  const int threads = static_cast<int>(blockDim.x), thread = block.split * threads + static_cast<int>(threadIdx.x);
  sync_cluster();
#pragma unroll 1
  for (int index = thread; index < block.count * kHeadDim; index += params.splits * threads) {
    const int m = index / kHeadDim, column = index % kHeadDim;
    const std::uint32_t own_facts = shared_address(facts + m), own_sums = shared_address(sums + m * pitch + column);
    float2 total = make_float2(-INFINITY, 0);
    float sum = 0;
#pragma unroll 1
    for (int first = 0; first < params.splits; first += kBatch) {
      float2 part[kBatch];
      float part_sum[kBatch], highest = total.x;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        part[i] = make_float2(-INFINITY, 0), part_sum[i] = 0;
        if (first + i >= params.splits) continue;
        part[i] = load_pair_from_block(address_in_block(own_facts, first + i));
        part_sum[i] = load_from_block(address_in_block(own_sums, first + i));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) highest = fmaxf(highest, part[i].x);
      const float rescale = weight_of(params.score, total.x, highest);
      total = make_float2(highest, total.y * rescale), sum *= rescale;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float weight = weight_of(params.score, part[i].x, highest);
        total.y += part[i].y * weight, sum += part_sum[i] * weight;
      }
    }
    const ResultRow result(params, block, m);
    const float inverse = inverse_sum<Element>(params, result.head, total);
    store_result<Element>(params, block.batch, result.head, result.row, column, sum * inverse);
    if (column == 0) store_row_facts(params, result.number, total.x, total.y);
  }
  sync_cluster();  // the others have read this block's
}

// Adds up what the block's warps have (`Warp`: DecodeWarp). If there is one split, that is the result, which is stored;
// else it is left for merge_cluster, or for the combine kernel.
template <typename Element, typename Warp>
__device__ inline void merge_warps(Warp& own, unsigned char* shared, float2* facts) {
  using Config = typename Warp::Config;
  constexpr int kHeadDim = Config::kHeadDim;
  const DecodeParams& params = own.params;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  float highest[2], factor[2];
  __syncthreads();  // lists and tiles are free now
  // Not before, as the next kernel's blocks would keep places from this one's.
  let_next_kernel_begin();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sum = over_row<Warp::kRowLanes>(own.row_sum[i], [](float a, float b) { return a + b; });
    highest[i] = own.is_safe ? own.true_max[i] : own.row_max[i];
    factor[i] = unrounded(params.score, highest[i]);
    if (own.is_first_of_row()) facts[warp * Config::kRows + own.row_of(i)] = make_float2(highest[i], sum * factor[i]);
  }
  __syncthreads();
  float* all_sums = reinterpret_cast<float*>(shared);
  const auto total_highest = [&](int m) {
    float total = -INFINITY;
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) total = fmaxf(total, facts[w * Config::kRows + m].x);
    return total;
  };
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float weight = factor[i] * weight_of(params.score, highest[i], total_highest(own.row_of(i)));
    float* row_sums = all_sums + (warp * Config::kRows + own.row_of(i)) * Config::kSumsPitch;
    if (own.row_of(i) >= own.block.count) continue;  // nobody asks for it
#pragma unroll
    for (int n = 0; n < Warp::kDimNTiles; ++n) {
      const float* pair = &own.accumulators[0][n][2 * i];
      if constexpr (Warp::kRowLanes == RowLanes::kEveryFourth) {
        row_sums[own.column_of(n, 0)] = pair[0] * weight;
        row_sums[own.column_of(n, 1)] = pair[1] * weight;
      } else {
        *reinterpret_cast<float2*>(row_sums + own.column_of(n, 0)) = make_float2(pair[0] * weight, pair[1] * weight);
      }
    }
  }
  float2* totals = facts + Config::kWarps * Config::kRows;
  float* inverses = reinterpret_cast<float*>(totals + Config::kRows);
  if (thread < Config::kRows) {
    float2 total = make_float2(total_highest(thread), 0);
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) {
      const float2 part = facts[w * Config::kRows + thread];
      total.y += part.y * weight_of(params.score, part.x, total.x);
    }
    totals[thread] = total;
    // Rows past the block's last have no head.
    if (thread < own.block.count) inverses[thread] = inverse_sum<Element>(params, own.block.head(thread), total);
  }
  __syncthreads();
  for (int index = thread; index < own.block.count * kHeadDim; index += Config::kThreads) {
    const int m = index / kHeadDim, column = index % kHeadDim;
    float* warp_sum = all_sums + m * Config::kSumsPitch + column;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) sum += warp_sum[w * Config::kRows * Config::kSumsPitch];
    if (kHasClusters && params.is_cluster) {
      *warp_sum = sum;  // nobody else reads that of the first warp
      continue;
    }
    const ResultRow result(params, own.block, m);
    if (params.splits == 1) {
      store_result<Element>(params, own.block.batch, result.head, result.row, column, sum * inverses[m]);
      if (column == 0) store_row_facts(params, result.number, totals[m].x, totals[m].y);
    } else {
      params.partial_sums[(result.number * params.splits + own.block.split) * kHeadDim + column] = sum;
      if (column == 0) params.partial_facts[result.number * params.splits + own.block.split] = totals[m];
    }
  }
  if constexpr (kHasClusters) {
    if (params.is_cluster) merge_cluster<Element, kHeadDim>(params, own.block, all_sums, Config::kSumsPitch, totals);
  }
}

}  // namespace flash_dmattn::internal::cuda
