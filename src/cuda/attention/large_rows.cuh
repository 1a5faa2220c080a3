// Rows of the backward whose lse is large (kLargeScore). Stored as one float32 such an lse is rounded, perhaps by more
// than the logarithm of the row's sum, and probabilities relative to it would be wrong by any factor. The forward
// therefore stores the row's maximum and the logarithm of its sum as two numbers (RowStats), and the scores of such
// rows are made relative to these.
#pragma once

#include <cstdint>

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/row_facts.cuh"
#include "cuda/attention/softmax.cuh"

namespace flash_dmattn::internal::cuda {

// The lse of a large row. Scores become their distances from it.
class LargeLse {
 public:
  __device__ LargeLse(const ScoreRule& rule, const RowStats& stats)
      : highest_(rule, stats.x), half_log2_sum_(0.5f * kLog2E * stats.y) {}

  __device__ float distance(const ScoreRule& rule, float score) const {
    return (highest_.distance(rule, score) - half_log2_sum_) * rule.inverse_half;
  }

 private:
  HalfProduct highest_;
  float half_log2_sum_;
};

// Turns the scores of the thread's row i, which is `row` of the problem and a large one, into their distances from lse.
template <int kMTiles, int kNTiles>
__device__ inline void subtract_large_lse(const BackwardParams& params, int batch, int head, int row, int i,
                                          float (&scores)[kMTiles][kNTiles][4]) {
  const std::int64_t index = (static_cast<std::int64_t>(batch) * params.heads + head) * params.rows + row;
  const LargeLse lse(params.score, params.row_stats[index]);
  for_each_in_row(scores, i, [&](int, int, float& score) { score = lse.distance(params.score, score); });
}

}  // namespace flash_dmattn::internal::cuda
