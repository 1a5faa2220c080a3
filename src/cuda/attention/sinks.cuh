// Sinks: a sink is a score without a key in the softmax sum of each of its head's rows. It changes facts of a row and
// nothing that is done for a score: the keys have a share of the sum, by which out shrinks, and so do the backward's
// probabilities, since the forward's lse, which leaves the sink out, gets the sink's part before it is subtracted.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/problem.h"

namespace flash_dmattn::internal::cuda {

// A query head's sink. NaN where it is +inf, whose share of a sum would be inf / inf.
template <typename Element>
__device__ inline float load_sink(const HeadView& sink, int head) {
  const std::int64_t at = head * sink.stride;
  const float value = sink.dtype == DType::kFloat32 ? static_cast<const float*>(sink.data)[at]
                                                    : static_cast<float>(static_cast<const Element*>(sink.data)[at]);
  return value == INFINITY ? NAN : value;
}

// What the sink adds to a row's softmax sum, relative to its highest score as that is. Infinite where it leaves float's
// range, which makes the keys' part of the sum 0.
__device__ inline float sink_weight(float sink, float highest_score) { return __expf(sink - highest_score); }

// How far the sink is above the keys' log-sum-exp, which is highest_score + log_sum. The highest score is subtracted
// first: where scores are large, one number cannot hold that sum. Infinite where it leaves float's range.
__device__ inline float sink_distance(float sink, float highest_score, float log_sum) {
  return (sink - highest_score) - log_sum;
}

// The logarithm of the sum with the sink in units of that without, 1 / the keys' share: 0 for a sink of -inf.
__device__ inline float log_sum_growth(float distance) {
  return fmaxf(distance, 0.0f) + log1pf(__expf(-fabsf(distance)));
}

// The sink's probability. Not 1 less the keys' share, which would lose small ones.
__device__ inline float sink_share(float distance) { return 1 / (1 + __expf(-distance)); }

}  // namespace flash_dmattn::internal::cuda
