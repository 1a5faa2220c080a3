// From products to attention scores, shared by forward and backward: scale, softcap, bias, visibility.
#pragma once

#include "core/problem.h"
#include "cpu/config.h"
#include "cpu/pack-inl.h"
#include "cpu/simd-inl.h"
#include "plan/chunk_plan.h"

namespace flash_dmattn::internal::cpu {
namespace {

constexpr int kTileVectors = kTileKeys / kLanes;
constexpr std::uint64_t kAllVisible = ~std::uint64_t{0};

// `count` (at most kTileKeys) bias values of one row for the listed keys from `first` on; `row` points at
// the row's key 0. Returns a pointer to kTileKeys readable floats, which may be `buffer`.
template <typename B>
HWY_INLINE const float* fetch_bias(const B* row, std::int64_t key_stride, const ChunkPlan& plan, int first, int count,
                                   float* buffer) {
  if (key_stride == 1 && plan.keys == nullptr) {
    const B* from = row + plan.key(first);
    if constexpr (sizeof(B) == sizeof(float)) {
      if (count == kTileKeys) return from;
    }
    convert_row(from, count, buffer);
  } else {
    B gathered[kTileKeys];
    for (int i = 0; i < count; ++i) gathered[i] = row[plan.key(first + i) * key_stride];
    convert_row(gathered, count, buffer);
  }
  fill_floats(buffer + count, kTileKeys - count, 0.0f);
  return buffer;
}

// The bias of one query head over one chunk's listed keys.
template <typename T>
class BiasReader {
 public:
  BiasReader() = default;
  BiasReader(const BroadcastView& bias, std::int64_t batch, std::int64_t head, const ChunkPlan& plan)
      : bias_(&bias), plan_(&plan) {
    offset_ = bias.offset(batch, head) + plan.row_begin * bias.row_stride;
  }

  bool defined() const { return bias_ != nullptr; }

  // Reads the keys [first, first + count) once for all rows if every row has the same bias.
  void load_block(int first, int count, float* block) {
    block_ = nullptr;
    if (bias_ == nullptr || bias_->row_stride != 0) return;
    for (int key = 0; key < count; key += kTileKeys) {
      const float* values = fetch(0, first + key, count - key < kTileKeys ? count - key : kTileKeys, block + key);
      if (values != block + key) std::memcpy(block + key, values, kTileKeys * sizeof(float));
    }
    block_ = block;
    block_first_ = first;
  }

  // kTileKeys values of `row` of the chunk for the listed keys from `first` on; null without a bias.
  HWY_INLINE const float* tile(int row, int first, float* buffer) const {
    if (bias_ == nullptr) return nullptr;
    if (block_ != nullptr) return block_ + (first - block_first_);
    const int left = plan_->key_count - first;
    return fetch(row, first, left < kTileKeys ? left : kTileKeys, buffer);
  }

 private:
  const float* fetch(int row, int first, int count, float* buffer) const {
    const std::int64_t at = offset_ + row * bias_->row_stride;
    if (bias_->dtype == DType::kFloat32) {
      return fetch_bias(static_cast<const float*>(bias_->data) + at, bias_->key_stride, *plan_, first, count, buffer);
    }
    return fetch_bias(static_cast<const T*>(bias_->data) + at, bias_->key_stride, *plan_, first, count, buffer);
  }

  const BroadcastView* bias_ = nullptr;
  const ChunkPlan* plan_ = nullptr;
  std::int64_t offset_ = 0;
  const float* block_ = nullptr;
  int block_first_ = 0;
};

// A row's scores are large if its maximum is. As a rule one fused operation scales a product and subtracts the
// maximum, exactly; but that maximum is rounded, so that where scores are large the highest would be far from 0. There
// products are rounded to scores first, by forward and backward alike.
constexpr float kLargeScore = 1024.0f;
HWY_INLINE bool is_large(float score) { return __builtin_fabsf(score) >= kLargeScore && __builtin_isfinite(score); }

// score = softcap(scale * product) + bias.
struct ScoreRule {
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none

  explicit ScoreRule(const AttentionProblem& problem)
      : scale(static_cast<float>(problem.scale)), softcap(static_cast<float>(problem.softcap)) {}

  // The score is a multiple of the product, in the same order, plus the bias.
  bool is_linear() const { return softcap == 0.0f && scale > 0.0f; }
  // Without a bias too, scaling can wait until the exponential.
  bool is_plain(bool has_bias) const { return is_linear() && !has_bias; }

  // Products of a plain rule to scores, in place, for rows whose scores are large.
  HWY_INLINE void scale_products(const TileClass* classes, int key_tiles, float* products) const {
    const Vec factor = hn::Set(kFloats, scale);
    for (int tile = 0; tile < key_tiles; ++tile) {
      if (classes[tile] == TileClass::kEmpty) continue;
      for (int key = tile * kTileKeys; key < (tile + 1) * kTileKeys; key += kLanes) {
        hn::Store(hn::Mul(hn::Load(kFloats, products + key), factor), kFloats, products + key);
      }
    }
  }

  // A tile's products to scores, in place. `bias` may be null. `slopes` (optional) receives
  // d score / d (scale * product) if there is a softcap.
  HWY_INLINE void apply_to_tile(float* products, const float* bias, float* slopes) const {
    const Vec factor = hn::Set(kFloats, scale);
    for (int key = 0; key < kTileKeys; key += kLanes) {
      Vec score = hn::Mul(hn::Load(kFloats, products + key), factor);
      if (softcap > 0.0f) {
        const Vec bent = hyperbolic_tangent(hn::Mul(score, hn::Set(kFloats, 1.0f / softcap)));
        score = hn::Mul(bent, hn::Set(kFloats, softcap));
        if (slopes != nullptr) {
          hn::Store(hn::NegMulAdd(bent, bent, hn::Set(kFloats, 1.0f)), kFloats, slopes + key);
        }
      }
      if (bias != nullptr) score = hn::Add(score, hn::LoadU(kFloats, bias + key));
      hn::Store(score, kFloats, products + key);
    }
  }
};

// Runs of neighbouring tiles that are not empty are multiplied together: multiply_run(begin, end) in tiles.
// False if every tile is empty.
template <typename MultiplyRun>
HWY_INLINE bool for_each_run(const TileClass* classes, int key_tiles, MultiplyRun multiply_run) {
  bool any = false;
  for (int begin = 0; begin < key_tiles;) {
    int end = begin;
    while (end < key_tiles && classes[end] != TileClass::kEmpty) ++end;
    if (end > begin) {
      multiply_run(begin, end);
      any = true;
    }
    begin = end + 1;
  }
  return any;
}

HWY_INLINE void count_tiles(const TileClass* classes, int key_tiles, int rows, AttentionCounters* counters) {
  for (int tile = 0; tile < key_tiles; ++tile) {
    if (classes[tile] == TileClass::kEmpty) continue;
    counters->tiles_visited += 1;
    counters->tiles_partial += classes[tile] == TileClass::kPartial;
    counters->computed_scores += static_cast<std::int64_t>(rows) * kTileKeys;
  }
}

// A query head's sink.
template <typename T>
HWY_INLINE float sink_of(const AttentionProblem& problem, std::int64_t head) {
  const std::int64_t at = head * problem.sink.stride;
  if (problem.sink.dtype == DType::kFloat32) return static_cast<const float*>(problem.sink.data)[at];
  float sink = 0.0f;
  convert_row(static_cast<const T*>(problem.sink.data) + at, 1, &sink);
  return sink;
}

// Token 0 of one head; null where there are no tokens.
template <typename T>
HWY_INLINE T* head_tokens(const TokenView& view, std::int64_t batch, std::int64_t head) {
  if (!view.defined()) return nullptr;
  return static_cast<T*>(view.data) + batch * view.batch_stride + head * view.head_stride;
}

}  // namespace
}  // namespace flash_dmattn::internal::cpu
