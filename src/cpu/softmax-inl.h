// Online softmax (Milakov and Gimelshein 2018) of one row over blocks of listed keys: what the forward over packed keys
// and the decode have in common. Each block's scores raise the row's running maximum, become probabilities relative to
// it, and are summed; what was summed before shrinks when the maximum rises.
#pragma once

#include <cmath>

#include "core/problem.h"
#include "cpu/scores-inl.h"
#include "cpu/sink-inl.h"

namespace flash_dmattn::internal::cpu {
namespace {

// Adds the bias, if there is one, to scaled products; hides what is not visible; returns the maxima of the
// lanes.
HWY_INLINE Vec finish_scores(float* scores, float scale, const float* bias, std::uint64_t visible) {
  const Vec hidden = hn::Set(kFloats, kMinusInfinity), factor = hn::Set(kFloats, scale);
  Vec highest[kTileVectors];
  HWY_UNROLL(4)
  for (int v = 0; v < kTileVectors; ++v) {
    float* at = scores + v * kLanes;
    highest[v] = hn::Load(kFloats, at);
    if (bias != nullptr) highest[v] = hn::MulAdd(highest[v], factor, hn::LoadU(kFloats, bias + v * kLanes));
    if (visible != kAllVisible) {
      highest[v] = hn::IfThenElse(mask_from_bits(visible >> (v * kLanes)), highest[v], hidden);
    }
    if (bias != nullptr || visible != kAllVisible) hn::Store(highest[v], kFloats, at);
  }
  // As a tree, whose latency is the logarithm of a chain's.
  for (int half = kTileVectors / 2; half > 0; half /= 2) {
    for (int v = 0; v < half; ++v) highest[v] = hn::Max(highest[v], highest[v + half]);
  }
  return highest[0];
}

// Products of `row` of the chunk with the listed keys from `first` on become scores, but for a scale that can wait.
// Returns their maximum, scaled.
template <typename T>
HWY_INLINE float make_scores(const ScoreRule& rule, const ChunkPlan& plan, int row, const TileClass* classes,
                             int key_tiles, int first, const BiasReader<T>& bias, float* scores) {
  Vec highest = hn::Set(kFloats, kMinusInfinity);
  for (int tile = 0; tile < key_tiles; ++tile) {
    if (classes[tile] == TileClass::kEmpty) continue;
    float* tile_scores = scores + tile * kTileKeys;
    const int listed = first + tile * kTileKeys;
    float buffer[kTileKeys];
    const float* tile_bias = bias.tile(row, listed, buffer);
    if (!rule.is_linear()) {
      rule.apply_to_tile(tile_scores, tile_bias, nullptr);
      tile_bias = nullptr;
    }
    const std::uint64_t visible =
        classes[tile] == TileClass::kFull ? kAllVisible : plan.visible(row, listed / kTileKeys);
    highest = hn::Max(highest, finish_scores(tile_scores, rule.scale, tile_bias, visible));
  }
  return hn::GetLane(hn::MaxOfLanes(kFloats, highest)) * (rule.is_plain(bias.defined()) ? rule.scale : 1.0f);
}

// The row's maximum rose: what was summed so far counts less.
HWY_NOINLINE void shrink_row(float difference, int out_stride, float* sum, float* out) {
  const Vec shrink = exponential<6>(hn::Set(kFloats, difference));
  *sum *= hn::GetLane(shrink);
  for (int i = 0; i < out_stride; i += kLanes) {
    hn::Store(hn::Mul(hn::Load(kFloats, out + i), shrink), kFloats, out + i);
  }
}

// A row's running maximum takes in that of a block.
HWY_INLINE void raise_maximum(float block_maximum, int out_stride, float* maximum, float* sum, float* out) {
  if (block_maximum > *maximum) {
    if (*maximum != kMinusInfinity) shrink_row(*maximum - block_maximum, out_stride, sum, out);
    *maximum = block_maximum;
  }
}

// What maxima are subtracted from: from -inf any finite number does, where subtracting -inf would make NaN.
HWY_INLINE float reference_of(float maximum) { return maximum == kMinusInfinity ? 0.0f : maximum; }

// One row's scores, as make_scores leaves them, become probabilities relative to its running maximum, in the form that
// `Products` reads.
template <typename Products>
HWY_INLINE void exponentiate(const ScoreRule& rule, bool has_bias, const TileClass* classes, int key_tiles,
                             float maximum, float* scores, float* sum) {
  const bool plain = rule.is_plain(has_bias), scales_first = plain && is_large(maximum);
  if (scales_first) rule.scale_products(classes, key_tiles, scores);
  const Vec scale = hn::Set(kFloats, plain && !scales_first ? rule.scale : 1.0f);
  const Vec offset = hn::Set(kFloats, -reference_of(maximum));
  Vec total = hn::Zero(kFloats);
  for (int tile = 0; tile < key_tiles; ++tile) {
    if (classes[tile] == TileClass::kEmpty) continue;
    HWY_UNROLL(4)
    for (int v = 0; v < kTileVectors; ++v) {
      const int key = tile * kTileKeys + v * kLanes;
      const Vec shifted = hn::MulAdd(hn::Load(kFloats, scores + key), scale, offset);
      const Vec p = exponential<Products::kExpDegree>(shifted);
      total = hn::Add(total, p);
      Products::store_probabilities(p, scores, key);
    }
  }
  *sum += hn::GetLane(hn::SumOfLanes(kFloats, total));
}

// A row's results from its maximum, the sum of its probabilities relative to that, and what they weighted.
template <typename T>
HWY_INLINE void write_row(const ForwardProblem& problem, std::int64_t batch, std::int64_t head, std::int64_t row,
                          float maximum, float sum, const float* out) {
  T* to = head_tokens<T>(problem.out, batch, head) + row * problem.out.token_stride;
  const std::int64_t at = (batch * problem.heads + head) * problem.rows + row;
  float log_sum = 0.0f, lse = kMinusInfinity;
  // Only a row without a visible score above -inf has the sum 0; a NaN sum makes the row NaN.
  if (sum == 0.0f) {
    maximum = kMinusInfinity;
    std::memset(to, 0, static_cast<std::size_t>(problem.value_dim) * sizeof(T));
  } else {
    const float factor = problem.sink.defined()
                             ? static_cast<float>(1 / sum_with_sink(sink_of<T>(problem, head), maximum, sum))
                             : 1.0f / sum;
    store_row(out, factor, problem.value_dim, to);
    log_sum = std::log(sum);
    lse = maximum + log_sum;
  }
  static_cast<float*>(problem.lse)[at] = lse;
  if (problem.row_stats == nullptr) return;
  auto* stats = static_cast<float*>(problem.row_stats) + 2 * at;
  stats[0] = maximum, stats[1] = log_sum;
}

}  // namespace
}  // namespace flash_dmattn::internal::cpu
