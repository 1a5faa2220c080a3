// The online softmax of Milakov and Gimelshein (arXiv 1805.02867), on a warp's fragments.
//
// A probability is 2^(multiplier * score - reference), where "score" is what stands for one (ScoreRule) and the
// reference is multiplier * maximum, rounded. The fused operation that makes the exponent does not round the product,
// so that the maximum's own exponent is what the reference's rounding took. Where the maximum is huge that is a number
// of any size, and is subtracted as well (shift_huge_row).
#pragma once

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/sinks.cuh"
#include "cuda/ptx/arithmetic.cuh"

namespace flash_dmattn::internal::cuda {

// The lanes of a warp that have parts of the same row: four neighbours, as the tensor core has rows of a product, or
// every fourth, as it has columns.
enum class RowLanes { kNeighbours, kEveryFourth };

// What `combine` makes of the lanes' values, for each row.
template <RowLanes kLanes, typename Combine>
__device__ inline float over_row(float value, Combine combine) {
  constexpr int kFirst = kLanes == RowLanes::kNeighbours ? 1 : 4, kEnd = kLanes == RowLanes::kNeighbours ? 4 : 32;
#pragma unroll
  for (int step = kFirst; step < kEnd; step *= 2) value = combine(value, __shfl_xor_sync(~0u, value, step));
  return value;
}

// The higher of `before` and the scores of the thread's row i.
template <RowLanes kLanes = RowLanes::kNeighbours, int kMTiles, int kNTiles>
__device__ inline float row_maximum(const float (&scores)[kMTiles][kNTiles][4], int i, float before) {
  const int m = i / 2, half = 2 * (i % 2);
  float highest = before;
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) highest = fmaxf(highest, fmaxf(scores[m][n][half], scores[m][n][half + 1]));
  return over_row<kLanes>(highest, [](float a, float b) { return fmaxf(a, b); });
}

// What a row's exponents are relative to. 0 for a row that has not seen any key yet: its scores are all -inf, and
// relative to -inf their probabilities would be NaN instead of 0.
__device__ inline float reference_of(float highest, float multiplier) {
  return highest == -INFINITY ? 0.0f : __fmul_rn(highest, multiplier);
}

__device__ inline bool is_huge(float reference) { return fabsf(reference) >= kHugeScore; }

// half_multiplier * highest as the sum of two numbers, exactly.
struct HalfProduct {
  float rounded, residual;

  __device__ HalfProduct(const ScoreRule& rule, float highest) {
    rounded = __fmul_rn(highest, rule.half_multiplier);
    residual = fmaf(highest, rule.half_multiplier, -rounded);
  }
  __device__ bool is_huge() const { return fabsf(rounded) >= kHugeScore / 2; }
  // half_multiplier * (score - highest)
  __device__ float distance(const ScoreRule& rule, float score) const {
    return fmaf(score, rule.half_multiplier, -rounded) - residual;
  }
};

// Comes before update_softmax, for each of the thread's rows i, where any row of the warp may be huge. Raises true_max,
// the row's maximum, to that of the tile, and turns the scores of a huge row into their distances from it, so that for
// update_softmax the row's maximum is 0.
template <RowLanes kLanes = RowLanes::kNeighbours, int kMTiles, int kNTiles, int kDimNTiles>
__device__ inline void shift_huge_row(const ScoreRule& rule, int i, float& true_max,
                                      float (&scores)[kMTiles][kNTiles][4], float (&row_max)[2 * kMTiles],
                                      float (&row_sum)[2 * kMTiles], float (&accumulators)[kMTiles][kDimNTiles][4]) {
  const float before = true_max, after = row_maximum<kLanes>(scores, i, before);
  if (after == -INFINITY) return;
  true_max = after;
  const HalfProduct product(rule, after);
  const bool huge = product.is_huge();
  if (after != before) {
    // Sums of a huge row are relative to the product itself, others to its rounding.
    const HalfProduct old(rule, before);
    const float residuals = (old.is_huge() ? old.residual : 0) - (huge ? product.residual : 0);
    const float rescale = before == -INFINITY ? 0.0f : exp2_fast(2 * (old.rounded - product.rounded + residuals));
    row_sum[i] *= rescale;
    for_each_in_row(accumulators, i, [&](int, int, float& accumulator) { accumulator *= rescale; });
  }
  row_max[i] = huge ? 0 : after;
  if (!huge) return;
  for_each_in_row(scores, i,
                  [&](int, int, float& score) { score = product.distance(rule, score) * rule.inverse_half; });
}

// Turns scores, times `multiplier` in units of log2, into probabilities relative to the new row maxima, highest_of(i),
// and rescales what was summed before: a thread's parts of row_sum, and accumulators.
template <int kMTiles, int kNTiles, int kDimNTiles, typename HighestOf>
__device__ inline void update_softmax(float multiplier, float (&scores)[kMTiles][kNTiles][4],
                                      float (&row_max)[2 * kMTiles], float (&row_sum)[2 * kMTiles],
                                      float (&accumulators)[kMTiles][kDimNTiles][4], HighestOf highest_of) {
#pragma unroll
  for (int i = 0; i < 2 * kMTiles; ++i) {
    const float highest = highest_of(i), reference = reference_of(highest, multiplier);
    const float rescale = exp2_fast(__fmul_rn(row_max[i], multiplier) - reference);
    row_max[i] = highest;
    float sum = 0;
    for_each_in_row(scores, i, [&](int, int, float& score) {
      score = exp2_fast(fmaf(score, multiplier, -reference));
      sum += score;
    });
    row_sum[i] = row_sum[i] * rescale + sum;
    // Seldom: after the first tiles a maximum hardly moves.
    if (__any_sync(~0u, rescale != 1)) {
      for_each_in_row(accumulators, i, [&](int, int, float& accumulator) { accumulator *= rescale; });
    }
  }
}

// update_softmax without what was summed before, which asynchronous products may still be adding to: that is to be
// multiplied by `rescale`.
template <int kMTiles, int kNTiles>
__device__ inline void exponentiate_rows(float multiplier, float (&scores)[kMTiles][kNTiles][4],
                                         float (&row_max)[2 * kMTiles], float (&row_sum)[2 * kMTiles],
                                         float (&rescale)[2 * kMTiles]) {
#pragma unroll
  for (int i = 0; i < 2 * kMTiles; ++i) {
    const float highest = row_maximum(scores, i, row_max[i]), reference = reference_of(highest, multiplier);
    rescale[i] = exp2_fast(__fmul_rn(row_max[i], multiplier) - reference);
    row_max[i] = highest;
    float sum = 0;
    for_each_in_row(scores, i, [&](int, int, float& score) {
      score = exp2_fast(fmaf(score, multiplier, -reference));
      sum += score;
    });
    row_sum[i] = row_sum[i] * rescale[i] + sum;
  }
}

template <int kMTiles, int kDimNTiles>
__device__ inline void rescale_rows(const float (&rescale)[2 * kMTiles],
                                    float (&accumulators)[kMTiles][kDimNTiles][4]) {
  for_each_element(accumulators, [&](int i, int, int, float& accumulator) { accumulator *= rescale[i]; });
}

// exponentiate_rows without looking for maxima: what a row's probabilities are relative to does not matter as long as
// they stay in range. Calm rows keep their row_max, which is then not the highest score but near it, until their
// probabilities of a tile add up to more than kTolerated; then it is raised (raise_references). FlashAttention 4 keeps
// references for a while, too, but looks for maxima to know when.
//
// A row is calm once it has seen a key, if its reference is small then: a score that is 2^64 times as likely as the
// highest of a whole tile is not to be expected. Where there is one all the same, the probability overflows, and
// has_huge_reference finds the row's sum.
constexpr float kTolerated = 256, kMostCalm = 64;

__device__ inline bool is_calm(float multiplier, float row_max) {
  return fabsf(__fmul_rn(row_max, multiplier)) <= kMostCalm;
}

// Of the thread's row i, `kGroup` scores after another. Says whether it is to be raised.
//
// The compiler would begin with all multiplications, beside which the unit that exponentiates has little to do, and end
// with nothing but exponentials. What a score is relative to is therefore there only once the first power of the group
// before is, times zero: the exponents of a group are made while the powers of the one before it are.
template <int kGroup, int kMTiles, int kNTiles>
__device__ inline bool exponentiate_calm_row(float multiplier, float (&scores)[kMTiles][kNTiles][4], int i,
                                             const float (&row_max)[2 * kMTiles], float (&row_sum)[2 * kMTiles]) {
  static_assert(kGroup % 2 == 0);
  float reference = __fmul_rn(row_max[i], multiplier);
  // Row by row: an operand that neighbouring instructions share is read from the registers once, and products in the
  // background need these, too.
  if (i > 0) reference = once_there(*pair_at(scores, i - 1, kNTiles * 3 / 4), reference);
  float sum = 0;
  for_each_in_row(scores, i, [&](int n, int pair, float& score) {
    // A power that is not finite leaves a sum that is not, and the row is computed again in any case.
    if (n > 0 && (2 * n + pair) % kGroup == 0) {
      reference = fmaf(*pair_at(scores, i, n - kGroup / 2), 0.0f, reference);
    }
    score = exp2_fast(fmaf(score, multiplier, -reference));
    sum += score;
  });
  row_sum[i] += sum;
  return !(sum <= kTolerated);
}

// Raises row_max of rows whose `probabilities` have grown, to where the highest of them is 1.
template <int kMTiles, int kNTiles, int kDimNTiles>
__device__ inline void raise_references(float multiplier, float (&probabilities)[kMTiles][kNTiles][4],
                                        float (&row_max)[2 * kMTiles], float (&row_sum)[2 * kMTiles],
                                        float (&accumulators)[kMTiles][kDimNTiles][4]) {
#pragma unroll
  for (int i = 0; i < 2 * kMTiles; ++i) {
    const float highest = row_maximum(probabilities, i, 1.0f), before = row_max[i];
    row_max[i] += log2f(highest) / multiplier;
    const float rescale = exp2_fast(__fmul_rn(before, multiplier) - __fmul_rn(row_max[i], multiplier));
    row_sum[i] *= rescale;
    for_each_in_row(probabilities, i, [&](int, int, float& probability) { probability *= rescale; });
    for_each_in_row(accumulators, i, [&](int, int, float& accumulator) { accumulator *= rescale; });
  }
}

// update_softmax in two halves, so that the second can be done part by part between products. The first half finds the
// new maxima and rescales to them what was summed before.
template <int kMTiles, int kNTiles, int kDimNTiles>
__device__ inline void rescale_sums(float multiplier, const float (&scores)[kMTiles][kNTiles][4],
                                    float (&row_max)[2 * kMTiles], float (&row_sum)[2 * kMTiles],
                                    float (&accumulators)[kMTiles][kDimNTiles][4], float (&reference)[2 * kMTiles]) {
  float rescale[2 * kMTiles];
  bool moved = false;
#pragma unroll
  for (int i = 0; i < 2 * kMTiles; ++i) {
    const float highest = row_maximum(scores, i, row_max[i]);
    reference[i] = reference_of(highest, multiplier);
    rescale[i] = exp2_fast(__fmul_rn(row_max[i], multiplier) - reference[i]);
    row_max[i] = highest;
    row_sum[i] *= rescale[i];
    moved |= rescale[i] != 1;
  }
  if (!__any_sync(~0u, moved)) return;
  for_each_element(accumulators, [&](int i, int, int, float& accumulator) { accumulator *= rescale[i]; });
}

// The second half, for one of `parts` parts of the columns of accumulators first_tile and first_tile + 1: turns scores
// into probabilities and adds them to the thread's `sum`.
template <int kMTiles, int kNTiles>
__device__ inline void exponentiate(float multiplier, const float (&reference)[2 * kMTiles],
                                    float (&scores)[kMTiles][kNTiles][4], float (&sum)[2 * kMTiles], int first_tile,
                                    int part, int parts) {
  constexpr int kCount = 2 * 2 * 2 * kMTiles;  // of the thread's scores in two tiles
#pragma unroll
  for (int index = 0; index < kCount; ++index) {
    if (index * parts / kCount != part) continue;
    const int n = first_tile + index % 2, i = index / 4, pair = index / 2 % 2;
    float& score = scores[i / 2][n][2 * (i % 2) + pair];
    score = exp2_in_order(fmaf(score, multiplier, -reference[i]));
    sum[i] += score;
  }
}

// What a row's sums are multiplied by to be relative to multiplier * true_max itself.
__device__ inline float unrounded(const ScoreRule& rule, float true_max) {
  const HalfProduct product(rule, true_max);
  return true_max == -INFINITY || product.is_huge() ? 1.0f : exp2_fast(-2 * product.residual);
}

// `sum`: of the row's probabilities, `unrounded`.
__device__ inline void store_row_facts(const ForwardParams& params, std::int64_t index, float true_max, float sum) {
  const bool empty = true_max == -INFINITY && sum == 0;
  const float log_sum = empty ? 0 : kLn2 * log2f(sum);
  params.lse[index] = empty ? -INFINITY : __fmul_rn(true_max, params.score.natural) + log_sum;
  if (params.row_stats != nullptr) params.row_stats[index] = make_float2(true_max, log_sum);
}

// What the sink, if there is one, adds to the `unrounded` sum of a row's probabilities. Of no meaning for a row without
// keys.
template <typename Element>
__device__ inline float sink_part(const ForwardParams& params, int head, float true_max) {
  if (!params.sink.defined()) return 0;
  return sink_weight(load_sink<Element>(params.sink, head), __fmul_rn(true_max, params.score.natural));
}

// The sum with that part, where `sum` is not `unrounded`.
template <typename Element>
__device__ inline float sum_with_sink(const ForwardParams& params, int head, float true_max, float sum) {
  if (!params.sink.defined()) return sum;
  return sum + __fdividef(sink_part<Element>(params, head, true_max), unrounded(params.score, true_max));
}

// Whether one of the thread's rows has to be computed again, in the way of shift_huge_row: by what is known before the
// last values are added, or has_infinite_sum. A row that was huge for a while and is no
// more is no harm, unless its probabilities left float's range.
template <int kRows>
__device__ inline bool has_huge_reference(float multiplier, const float (&row_max)[kRows],
                                          const float (&row_sum)[kRows]) {
  bool huge = false;
#pragma unroll
  for (int i = 0; i < kRows; ++i) huge |= is_huge(reference_of(row_max[i], multiplier)) || !isfinite(row_sum[i]);
  return huge;
}

template <int kMTiles, int kDimNTiles>
__device__ inline bool has_infinite_sum(const float (&accumulators)[kMTiles][kDimNTiles][4]) {
  bool infinite = false;
#pragma unroll
  for (int i = 0; i < 2 * kMTiles; ++i) infinite |= !isfinite(*pair_at(accumulators, i, 0));
  return infinite;
}

}  // namespace flash_dmattn::internal::cuda
