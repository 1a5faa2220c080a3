// The forward: online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) over blocks of listed keys.
#pragma once

#include <cmath>

#include "core/arena.h"
#include "cpu/kernel_set.h"
#include "cpu/scores-inl.h"

namespace flash_dmattn::internal::cpu {
namespace {

template <typename Products, typename T>
class ForwardUnit {
 public:
  static std::size_t scratch_bytes(const AttentionProblem& problem, const ForwardSchedule& schedule) {
    return ForwardUnit(problem, schedule, IntervalIndices(problem, nullptr), nullptr).arena_.used();
  }

  ForwardUnit(const AttentionProblem& problem, const ForwardSchedule& schedule, const IntervalIndices& indices,
              void* scratch)
      : arena_(scratch),
        planner_(problem, indices, schedule.chunk_rows, kForwardRowTile,
                 arena_.take<std::byte>(ChunkPlanner::scratch_bytes(problem, schedule.chunk_rows, kForwardRowTile))),
        rule_(problem),
        head_dim_(static_cast<int>(problem.head_dim)),
        out_stride_(Products::out_stride(head_dim_)),
        padded_rows_(static_cast<int>(round_up(schedule.chunk_rows, kForwardRowTile))) {
    const std::int64_t all_rows = static_cast<std::int64_t>(schedule.pass_heads) * padded_rows_;
    const int block_keys = static_cast<int>(problem.keys < kKeyBlock ? round_up(problem.keys, kTileKeys) : kKeyBlock);
    queries_ = arena_.take<Packed>(Products::left_size(all_rows, head_dim_));
    keys_ = arena_.take<Packed>(Products::columns_size(block_keys, head_dim_));
    values_ = arena_.take<Packed>(Products::depth_size(block_keys, head_dim_));
    out_ = arena_.take<float>(static_cast<std::size_t>(all_rows * out_stride_));
    maxima_ = arena_.take<float>(static_cast<std::size_t>(all_rows));
    sums_ = arena_.take<float>(static_cast<std::size_t>(all_rows));
    scores_ = arena_.take<float>(kForwardRowTile * kScoreStride);
    bias_block_ = arena_.take<float>(problem.bias.defined() ? kKeyBlock : 0);
  }

  void run(const ForwardProblem& problem, const ForwardSchedule& schedule, std::int64_t index,
           AttentionCounters* counters) {
    problem_ = &problem;
    counters_ = counters;
    const ForwardSchedule::Unit unit = schedule.unit(problem, index);
    const std::int64_t group = problem.group();
    for (std::int64_t key_head = unit.key_head_begin; key_head < unit.key_head_end; ++key_head) {
      for (std::int64_t head = key_head * group; head < (key_head + 1) * group; head += schedule.pass_heads) {
        const ChunkPlan& plan = planner_.plan(unit.batch, head, unit.row_begin, unit.rows);
        if (counters != nullptr) count_plan(plan, schedule.pass_heads, counters);
        attend(plan, unit.batch, key_head, head, schedule.pass_heads);
      }
    }
  }

 private:
  using Packed = typename Products::Packed;

  // Query heads [head, head + heads) of one key head over the chunk's rows.
  void attend(const ChunkPlan& plan, std::int64_t batch, std::int64_t key_head, std::int64_t head, int heads) {
    const ForwardProblem& problem = *problem_;
    for (int h = 0; h < heads; ++h) {
      RowSource<T> rows;
      rows.head = head_tokens<T>(problem.query, batch, head + h);
      rows.stride = problem.query.token_stride;
      rows.begin = plan.row_begin;
      rows.count = plan.rows;
      rows.head_dim = head_dim_;
      Products::template pack_left<kForwardRowTile>(rows, static_cast<int>(round_up(plan.rows, kForwardRowTile)),
                                                    queries_ + Products::left_size(h * padded_rows_, head_dim_));
      fill_floats(out_ + static_cast<std::int64_t>(h) * padded_rows_ * out_stride_,
                  static_cast<std::int64_t>(plan.rows) * out_stride_, 0.0f);
      fill_floats(maxima_ + h * padded_rows_, plan.rows, kMinusInfinity);
      fill_floats(sums_ + h * padded_rows_, plan.rows, 0.0f);
    }
    const T* keys = head_tokens<T>(problem.key, batch, key_head);
    const T* values = head_tokens<T>(problem.value, batch, key_head);
    for (int first = 0; first < plan.key_count; first += kKeyBlock) {
      const int count = plan.key_count - first < kKeyBlock ? plan.key_count - first : kKeyBlock;
      const int padded = static_cast<int>(round_up(count, kTileKeys));
      Products::pack_columns(key_rows(plan, keys, problem.key.token_stride, head_dim_, first, count), padded, keys_);
      Products::pack_depth(key_rows(plan, values, problem.value.token_stride, head_dim_, first, count), padded,
                           values_);
      if (counters_ != nullptr) counters_->copied_keys += count;
      for (int h = 0; h < heads; ++h) {
        BiasReader<T> bias;
        if (problem.bias.defined()) {
          bias = BiasReader<T>(problem.bias, batch, head + h, plan);
          bias.load_block(first, count, bias_block_);
        }
        for (int tile = 0; tile < plan.row_tiles(); ++tile) attend_tile(plan, h, tile, first, padded, bias);
      }
    }
    for (int h = 0; h < heads; ++h) finish(plan, batch, head + h, h);
  }

  // One row tile of local head `h` against the packed keys, which are the listed ones from `first` on.
  void attend_tile(const ChunkPlan& plan, int h, int row_tile, int first, int padded, const BiasReader<T>& bias) {
    const int row_begin = row_tile * kForwardRowTile;
    const int rows = plan.rows - row_begin < kForwardRowTile ? plan.rows - row_begin : kForwardRowTile;
    const int key_tiles = padded / kTileKeys;
    const TileClass* classes =
        plan.classes + static_cast<std::int64_t>(row_tile) * plan.key_tiles() + first / kTileKeys;
    const Packed* queries = queries_ + Products::left_size(h * padded_rows_, head_dim_);
    if (!for_each_run(classes, key_tiles, [&](int begin, int end) {
          Products::template multiply_scores<kForwardRowTile>(queries, row_tile, rows, keys_, head_dim_,
                                                              begin * kTileKeys, end * kTileKeys, scores_);
        })) {
      return;
    }
    if (counters_ != nullptr) count_tiles(classes, key_tiles, rows, counters_);
    // Two loops, so that no row waits for its own maximum.
    const int at = h * padded_rows_ + row_begin;
    float* out = out_ + static_cast<std::int64_t>(at) * out_stride_;
    for (int row = 0; row < rows; ++row) {
      raise_maximum(plan, row_begin + row, classes, key_tiles, first, bias, scores_ + row * kScoreStride,
                    &maxima_[at + row], &sums_[at + row], out + static_cast<std::int64_t>(row) * out_stride_);
    }
    const bool plain = rule_.is_plain(bias.defined());
    for (int row = 0; row < rows; ++row) {
      const bool scales_first = plain && is_large(maxima_[at + row]);
      if (scales_first) rule_.scale_products(classes, key_tiles, scores_ + row * kScoreStride);
      const float factor = plain && !scales_first ? rule_.scale : 1.0f;
      exponentiate(classes, key_tiles, factor, maxima_[at + row], scores_ + row * kScoreStride, &sums_[at + row]);
    }
    for_each_run(classes, key_tiles, [&](int begin, int end) {
      Products::accumulate_rows(scores_, rows, values_, padded, head_dim_, begin * kTileKeys, end * kTileKeys, out);
    });
  }

  // One row's products become scores, but for a scale that can wait, and its running maximum is updated.
  HWY_INLINE void raise_maximum(const ChunkPlan& plan, int row, const TileClass* classes, int key_tiles, int first,
                                const BiasReader<T>& bias, float* scores, float* maximum, float* sum, float* out) {
    const bool plain = rule_.is_plain(bias.defined());
    Vec highest = hn::Set(kFloats, kMinusInfinity);
    for (int tile = 0; tile < key_tiles; ++tile) {
      if (classes[tile] == TileClass::kEmpty) continue;
      float* tile_scores = scores + tile * kTileKeys;
      const int listed = first + tile * kTileKeys;
      float buffer[kTileKeys];
      const float* tile_bias = bias.tile(row, listed, buffer);
      if (!rule_.is_linear()) {
        rule_.apply_to_tile(tile_scores, tile_bias, nullptr);
        tile_bias = nullptr;
      }
      const std::uint64_t visible =
          classes[tile] == TileClass::kFull ? kAllVisible : plan.visible(row, listed / kTileKeys);
      highest = hn::Max(highest, finish_scores(tile_scores, rule_.scale, tile_bias, visible));
    }
    const float factor = plain ? rule_.scale : 1.0f;
    const float block_maximum = hn::GetLane(hn::MaxOfLanes(kFloats, highest)) * factor;
    if (block_maximum > *maximum) {
      if (*maximum != kMinusInfinity) shrink_row(*maximum - block_maximum, sum, out);
      *maximum = block_maximum;
    }
  }

  // One row's scores become probabilities relative to its running maximum.
  static HWY_INLINE void exponentiate(const TileClass* classes, int key_tiles, float factor, float maximum,
                                      float* scores, float* sum) {
    // Subtracting -inf from -inf would be NaN; where nothing is visible any finite reference does.
    const Vec scale = hn::Set(kFloats, factor);
    const Vec offset = hn::Set(kFloats, maximum == kMinusInfinity ? 0.0f : -maximum);
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

  // Adds the bias, if there is one, to scaled products; hides what is not visible; returns the maxima of the
  // lanes.
  static HWY_INLINE Vec finish_scores(float* scores, float scale, const float* bias, std::uint64_t visible) {
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

  // The row's maximum rose: what was summed so far counts less.
  HWY_NOINLINE void shrink_row(float difference, float* sum, float* out) const {
    const Vec shrink = exponential<6>(hn::Set(kFloats, difference));
    *sum *= hn::GetLane(shrink);
    for (int i = 0; i < out_stride_; i += kLanes) {
      hn::Store(hn::Mul(hn::Load(kFloats, out + i), shrink), kFloats, out + i);
    }
  }

  void finish(const ChunkPlan& plan, std::int64_t batch, std::int64_t head, int h) {
    const ForwardProblem& problem = *problem_;
    T* out = head_tokens<T>(problem.out, batch, head);
    const std::int64_t first = (batch * problem.heads + head) * problem.rows + plan.row_begin;
    float* lse = static_cast<float*>(problem.lse) + first;
    float* stats = problem.row_stats == nullptr ? nullptr : static_cast<float*>(problem.row_stats) + 2 * first;
    for (int row = 0; row < plan.rows; ++row) {
      const int at = h * padded_rows_ + row;
      T* to = out + (plan.row_begin + row) * problem.out.token_stride;
      // Only a row without a visible score above -inf has the sum 0; a NaN sum makes the row NaN.
      if (sums_[at] == 0.0f) {
        std::memset(to, 0, static_cast<std::size_t>(head_dim_) * sizeof(T));
        lse[row] = kMinusInfinity;
        if (stats != nullptr) stats[2 * row] = kMinusInfinity, stats[2 * row + 1] = 0.0f;
        continue;
      }
      store_row(out_ + static_cast<std::int64_t>(at) * out_stride_, 1.0f / sums_[at], head_dim_, to);
      const float log_sum = std::log(sums_[at]);
      lse[row] = maxima_[at] + log_sum;
      if (stats != nullptr) stats[2 * row] = maxima_[at], stats[2 * row + 1] = log_sum;
    }
  }

  Arena arena_;
  ChunkPlanner planner_;
  ScoreRule rule_;
  int head_dim_, out_stride_, padded_rows_;
  const ForwardProblem* problem_ = nullptr;
  AttentionCounters* counters_ = nullptr;
  Packed *queries_, *keys_, *values_;
  float *out_, *maxima_, *sums_, *scores_, *bias_block_;
};

}  // namespace
}  // namespace flash_dmattn::internal::cpu
