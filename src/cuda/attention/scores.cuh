// From products to scores: scale, softcap, bias. The same code in forward and backward.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/copy.cuh"

namespace flash_dmattn::internal::cuda {

// tanh of x / (2 log2(e)). Four at a time, which the instructions' fixed order keeps apart: interleaved with others
// they would take registers that the kernels do not have. 1 - 2 / (2^x + 1) is within 2^-22 of the true value
// (tanh.approx within 2^-11 only); near 0, where 2^-22 is a large part of tanh, Taylor's series is used.
__device__ inline void tanh_of_scaled(float (&x)[4]) {
  constexpr float kSeriesEnds = 0.2f, kUnscale = 0.5f * kLn2;
  float exponential[4], inverse[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) exponential[i] = exp2_in_order(x[i]);
#pragma unroll
  for (int i = 0; i < 4; ++i) inverse[i] = reciprocal_in_order(exponential[i] + 1);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float t = x[i] * kUnscale, square = t * t;
    const float series = t * fmaf(square, fmaf(square, fmaf(square, -17.0f / 315, 2.0f / 15), -1.0f / 3), 1.0f);
    x[i] = fabsf(t) < kSeriesEnds ? series : 1 - 2 * inverse[i];
  }
}

template <typename Element>
__device__ inline float load_bias(const BroadcastView& bias, std::int64_t offset) {
  if (bias.dtype == DType::kFloat32) return static_cast<const float*>(bias.data)[offset];
  return static_cast<float>(static_cast<const Element*>(bias.data)[offset]);
}

// Asks for what load_bias will read.
__device__ inline void prefetch_bias(const BroadcastView& bias, std::int64_t offset) {
  prefetch_to_l1(static_cast<const unsigned char*>(bias.data) + offset * (bias.dtype == DType::kFloat32 ? 4 : 2));
}

template <int kMTiles, int kNTiles>
__device__ inline void scale_by(float factor, float (&scores)[kMTiles][kNTiles][4]) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = __fmul_rn(scores[m][n][i], factor);
}

// Makes scores of products, bias aside. Forward and backward must round in the same way, since large scores differ by
// no more than their rounding: what the compiler might fuse in one kernel and not in another is spelled out here and
// below.
template <int kMTiles, int kNTiles>
__device__ inline void scale_products(const ScoreRule& rule, float (&scores)[kMTiles][kNTiles][4]) {
  const bool capped = rule.softcap != 0;
  // Not by scale_by: which of the two it is, is asked where it is used, or it takes a register that sm_80 lacks.
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[m][n][i] = __fmul_rn(scores[m][n][i], capped ? rule.inner_scale : rule.scale);
      }
  if (!capped) return;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      tanh_of_scaled(scores[m][n]);
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[m][n][i] = __fmul_rn(scores[m][n][i], rule.softcap);
    }
}

// The same, but leaves it to add_key_bias, or scale_by, to multiply by outer_scale.
template <int kMTiles, int kNTiles>
__device__ inline void cap_products(const ScoreRule& rule, float (&scores)[kMTiles][kNTiles][4]) {
  if (rule.softcap != 0) scale_products(rule, scores);
}

// The derivative of the softcap at a score that it has capped: 1 - tanh(x)^2.
__device__ inline float softcap_derivative(const ScoreRule& rule, float capped) {
  const float tanh = capped * rule.inverse_softcap;
  return 1 - tanh * tanh;
}

// Adds a bias that differs by row, after scale_products: to fuse that with the sum takes more registers here. row_of(i)
// is the thread's row i of the problem, key_of(n, pair) the key of a column, or less than 0.
template <typename Bias, int kMTiles, int kNTiles, typename RowOf, typename KeyOf>
__device__ inline void add_row_bias_as(const Bias* bias, const BroadcastView& view, std::int32_t rows,
                                       float (&scores)[kMTiles][kNTiles][4], RowOf row_of, KeyOf key_of) {
#pragma unroll
  for (int n = 0; n < kNTiles; ++n)
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int key = key_of(n, pair);
      const Bias* key_bias = bias + key * view.key_stride;
#pragma unroll
      for (int i = 0; i < 2 * kMTiles; ++i) {
        // Addresses of rows are worked out anew for every key: kept, they would take too many registers.
        const int row = recomputed(min(row_of(i), rows - 1));
        const float value = key >= 0 ? static_cast<float>(key_bias[row * view.row_stride]) : 0.0f;
        float& score = scores[i / 2][n][2 * (i % 2) + pair];
        score = __fadd_rn(score, value);
      }
    }
}

template <typename Element, int kMTiles, int kNTiles, typename RowOf, typename KeyOf>
__device__ inline void add_row_bias(const BroadcastView& view, std::int64_t offset, std::int32_t rows,
                                    float (&scores)[kMTiles][kNTiles][4], RowOf row_of, KeyOf key_of) {
  if (view.dtype == DType::kFloat32) {
    add_row_bias_as(static_cast<const float*>(view.data) + offset, view, rows, scores, row_of, key_of);
  } else {
    add_row_bias_as(static_cast<const Element*>(view.data) + offset, view, rows, scores, row_of, key_of);
  }
}

// score = factor * score + bias, for a bias that is the same for every row, after cap_products.
template <int kMTiles, int kNTiles, typename BiasOf>
__device__ inline void add_key_bias(float factor, float (&scores)[kMTiles][kNTiles][4], BiasOf bias_of) {
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
    const float2 bias = bias_of(n);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      scores[m][n][0] = __fmaf_rn(scores[m][n][0], factor, bias.x);
      scores[m][n][1] = __fmaf_rn(scores[m][n][1], factor, bias.y);
      scores[m][n][2] = __fmaf_rn(scores[m][n][2], factor, bias.x);
      scores[m][n][3] = __fmaf_rn(scores[m][n][3], factor, bias.y);
    }
  }
}

}  // namespace flash_dmattn::internal::cuda
