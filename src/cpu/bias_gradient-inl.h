// Collects the gradient of the bias, in the shape of the bias, while the backward walks over its tiles.
#pragma once

#include "cpu/gradient_sums-inl.h"
#include "cpu/scores-inl.h"

namespace flash_dmattn::internal::cpu {
namespace {

// One per unit. Of BiasGradient: kDirect writes finished rows, kStrip sums whole rows of one bias head for
// the chunk's rows, kColumns sums each key block and adds it to the unit's columns.
template <typename T>
class BiasGradientSink {
 public:
  BiasGradientSink(const BackwardProblem& problem, const BackwardSchedule& schedule, Arena& arena)
      : problem_(problem), kind_(schedule.bias_gradient) {
    if (kind_ == BiasGradient::kStrip) {
      strip_ = arena.take<float>(static_cast<std::size_t>(schedule.chunk_rows * problem.dbias.keys));
    }
    if (kind_ == BiasGradient::kColumns) block_ = arena.take<float>(kKeyBlock);
  }

  bool wanted() const { return kind_ != BiasGradient::kNone; }
  bool wants_columns() const { return kind_ == BiasGradient::kColumns; }

  void begin_unit(float* columns, std::size_t size) {
    columns_ = columns;
    if (columns != nullptr) fill_floats(columns, static_cast<std::int64_t>(size), 0.0f);
  }

  // Rows of one head of the bias begin: nothing is summed yet.
  void begin_strip(int rows) {
    if (kind_ == BiasGradient::kStrip) fill_floats(strip_, rows * problem_.dbias.keys, 0.0f);
  }
  void end_strip(std::int64_t batch, std::int64_t head, std::int64_t row_begin, int rows) {
    if (kind_ != BiasGradient::kStrip) return;
    const std::int64_t to = problem_.dbias.offset(batch, head) + row_begin * problem_.dbias.row_stride;
    store(strip_, static_cast<std::int64_t>(rows) * problem_.dbias.keys, to);
  }

  // The chunk's rows of query head `head`; `local_head` within its key head's group.
  void begin_head(const ChunkPlan& plan, std::int64_t batch, std::int64_t head, std::int64_t local_head) {
    plan_ = &plan;
    const BroadcastView& dbias = problem_.dbias;
    if (kind_ == BiasGradient::kDirect) row_offset_ = dbias.offset(batch, head) + plan.row_begin * dbias.row_stride;
    if (kind_ == BiasGradient::kColumns) {
      head_columns_ = columns_ + (dbias.head_divisor == 1 ? local_head * dbias.keys : 0);
    }
  }
  // Scores that are never computed have a zero gradient.
  void clear_rows(const ChunkPlan& plan, std::int64_t batch, std::int64_t head) {
    if (kind_ != BiasGradient::kDirect) return;
    const BroadcastView& dbias = problem_.dbias;
    const std::size_t size = size_of(dbias.dtype);
    const std::int64_t at = dbias.offset(batch, head) + plan.row_begin * dbias.row_stride;
    std::memset(static_cast<std::byte*>(dbias.data) + static_cast<std::size_t>(at) * size, 0,
                static_cast<std::size_t>(plan.rows * dbias.keys) * size);
  }

  void begin_block() {
    if (kind_ == BiasGradient::kColumns) fill_floats(block_, kKeyBlock, 0.0f);
  }
  void end_block(int first, int count) {
    if (kind_ != BiasGradient::kColumns) return;
    const bool per_key = problem_.dbias.keys > 1 || problem_.keys == 1;
    if (per_key) {
      for (int key = 0; key < count; ++key) head_columns_[plan_->key(first + key)] += block_[key];
    } else {
      for (int key = 0; key < count; key += kTileKeys) head_columns_[0] += sum_tile(block_ + key);
    }
  }

  // One vector of d loss / d score at `in_block` of the key block, for a bias that all rows share.
  HWY_INLINE void add_to_columns(Vec gradient, int in_block) {
    hn::Store(hn::Add(hn::Load(kFloats, block_ + in_block), gradient), kFloats, block_ + in_block);
  }

  // `values`: d loss / d score of `row` of the chunk for the kTileKeys listed keys from `first` on, 0 where
  // hidden; `in_block` is the tile's place in the key block.
  HWY_INLINE void add_tile(int row, int first, int in_block, const float* values) {
    if (kind_ == BiasGradient::kColumns) {
      for (int key = 0; key < kTileKeys; key += kLanes) {
        add_to_columns(hn::Load(kFloats, values + key), in_block + key);
      }
      return;
    }
    const int left = plan_->key_count - first;
    const int count = left < kTileKeys ? left : kTileKeys;
    if (kind_ == BiasGradient::kStrip) {
      add_to_strip(row, first, count, values);
    } else if (problem_.dbias.dtype == DType::kFloat32) {
      write(static_cast<float*>(problem_.dbias.data), row, first, count, values);
    } else {
      write(static_cast<T*>(problem_.dbias.data), row, first, count, values);
    }
  }

 private:
  // Pairwise, so that rounding errors do not add up: what is summed cancels out but for a rest. Beyond the
  // listed keys the values are 0.
  static HWY_INLINE float sum_tile(const float* values) {
    Vec sums[kTileVectors];
    for (int v = 0; v < kTileVectors; ++v) sums[v] = hn::LoadU(kFloats, values + v * kLanes);
    for (int half = kTileVectors / 2; half > 0; half /= 2) {
      for (int v = 0; v < half; ++v) sums[v] = hn::Add(sums[v], sums[v + half]);
    }
    return hn::GetLane(hn::SumOfLanes(kFloats, sums[0]));
  }

  void add_to_strip(int row, int first, int count, const float* values) {
    float* to = strip_ + static_cast<std::int64_t>(row) * problem_.dbias.keys;
    const bool per_key = problem_.dbias.keys > 1 || problem_.keys == 1;
    if (!per_key) {
      to[0] += sum_tile(values);
    } else if (plan_->keys == nullptr) {
      to += plan_->key(first);
      for (int key = 0; key < count; ++key) to[key] += values[key];
    } else {
      for (int key = 0; key < count; ++key) to[plan_->key(first + key)] += values[key];
    }
  }

  template <typename B>
  void write(B* dbias, int row, int first, int count, const float* values) {
    B* to = dbias + row_offset_ + row * problem_.dbias.row_stride;
    if (plan_->keys == nullptr) return store_row(values, 1.0f, count, to + plan_->key(first));
    B converted[kTileKeys];
    store_row(values, 1.0f, kTileKeys, converted);
    for (int key = 0; key < count; ++key) to[plan_->key(first + key)] = converted[key];
  }

  void store(const float* values, std::int64_t count, std::int64_t to) {
    if (problem_.dbias.dtype == DType::kFloat32) {
      store_row(values, 1.0f, count, static_cast<float*>(problem_.dbias.data) + to);
    } else {
      store_row(values, 1.0f, count, static_cast<T*>(problem_.dbias.data) + to);
    }
  }

  const BackwardProblem& problem_;
  BiasGradient kind_;
  const ChunkPlan* plan_ = nullptr;
  float *strip_ = nullptr, *block_ = nullptr, *columns_ = nullptr, *head_columns_ = nullptr;
  std::int64_t row_offset_ = 0;
};

}  // namespace
}  // namespace flash_dmattn::internal::cpu
