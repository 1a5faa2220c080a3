// Puts the parts of a row's result together, and stores it.
#pragma once

#include <cstdint>

#include "cuda/attention/softmax.cuh"
#include "cuda/decode/config.h"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/dependent_launch.cuh"

namespace flash_dmattn::internal::cuda {

// Each part of a row's result comes with facts, a float2: x is the highest score, or product where products stand for
// scores (ScoreRule), y the sum of probabilities relative to x. This is what the part's sums are multiplied by to be
// added to those of other parts, where `total_highest` is the highest x of all.
__device__ inline float weight_of(const ScoreRule& rule, float highest, float total_highest) {
  return highest == -INFINITY ? 0.0f : exp2_fast(2 * HalfProduct(rule, total_highest).distance(rule, highest));
}

// What a row's sums are multiplied by to be its result; total: the facts of the whole row.
template <typename Element>
__device__ inline float inverse_sum(const DecodeParams& params, int head, float2 total) {
  if (total.x == -INFINITY && total.y == 0) return 0;
  return 1.0f / (total.y + sink_part<Element>(params, head, total.x));
}

template <typename Element>
__device__ inline void store_result(const DecodeParams& params, int batch, int head, int row, int column, float value) {
  if (column >= params.value_dim) return;
  auto* out = static_cast<Element*>(params.out.data) + batch * params.out.batch_stride + row * params.out.token_stride +
              head * params.out.head_stride;
  out[column] = static_cast<Element>(value);
}

constexpr int kCombineWarps = 4;

// Parts of a row's result, added up. Element i of the lane is column i * 32 + lane.
template <int kHeadDim>
struct PartialRow {
  static constexpr int kColumns = kHeadDim / 32;
  float2 facts = make_float2(-INFINITY, 0);
  float sums[kColumns] = {};

  // Adds parts first, first + step, ... below `count`, those of a batch read at the same time.
  __device__ void add(const ScoreRule& rule, const float2* part_facts, const float* part_sums, int pitch, int first,
                      int count, int step) {
    constexpr int kBatch = 4;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (; first < count; first += kBatch * step) {
      float2 part[kBatch];
      float part_sum[kBatch][kColumns];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int index = first + i * step;
        part[i] = make_float2(-INFINITY, 0);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) part_sum[i][j] = 0;
        if (index >= count) continue;
        part[i] = part_facts[index];
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          part_sum[i][j] = part_sums[static_cast<std::int64_t>(index) * pitch + j * 32 + lane];
        }
      }
      float highest = facts.x;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) highest = fmaxf(highest, part[i].x);
      const float rescale = weight_of(rule, facts.x, highest);
      facts = make_float2(highest, facts.y * rescale);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) sums[j] *= rescale;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const float weight = weight_of(rule, part[i].x, highest);
        facts.y += part[i].y * weight;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) sums[j] += part_sum[i][j] * weight;
      }
    }
  }
};

// One block for each query row of a head; each warp adds up every fourth split, and the first warp the four.
template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(32 * kCombineWarps) combine_kernel(const __grid_constant__ DecodeParams params) {
  __shared__ float warp_sums[kCombineWarps][kHeadDim];
  __shared__ float2 warp_facts[kCombineWarps];
  const auto result = static_cast<std::int64_t>(blockIdx.x);
  const unsigned heads = static_cast<unsigned>(params.heads), pair = blockIdx.x / static_cast<unsigned>(params.rows);
  const auto row = static_cast<int>(blockIdx.x % static_cast<unsigned>(params.rows));
  const auto batch = static_cast<int>(pair / heads), head = static_cast<int>(pair % heads);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  begin_dependent_kernel();
  PartialRow<kHeadDim> own;
  own.add(params.score, params.partial_facts + result * params.splits,
          params.partial_sums + result * params.splits * kHeadDim, kHeadDim, warp, params.splits, kCombineWarps);
#pragma unroll
  for (int j = 0; j < own.kColumns; ++j) warp_sums[warp][j * 32 + lane] = own.sums[j];
  if (lane == 0) warp_facts[warp] = own.facts;
  __syncthreads();
  if (warp != 0) return;
  PartialRow<kHeadDim> total;
  total.add(params.score, warp_facts, warp_sums[0], kHeadDim, 0, kCombineWarps, 1);
  const float inverse = inverse_sum<Element>(params, head, total.facts);
#pragma unroll
  for (int j = 0; j < total.kColumns; ++j) {
    store_result<Element>(params, batch, head, row, j * 32 + lane, total.sums[j] * inverse);
  }
  if (lane == 0) store_row_facts(params, result, total.facts.x, total.facts.y);
}

}  // namespace flash_dmattn::internal::cuda
