// The forward over packed keys (Dao et al. 2022). Calls of few rows have one of their own: decode-inl.h.
#pragma once

#include "core/arena.h"
#include "cpu/kernel_set.h"
#include "cpu/softmax-inl.h"

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
        value_dim_(static_cast<int>(problem.value_dim)),
        out_stride_(Products::out_stride(value_dim_)),
        padded_rows_(static_cast<int>(round_up(schedule.chunk_rows, kForwardRowTile))) {
    const std::int64_t all_rows = static_cast<std::int64_t>(schedule.pass_heads) * padded_rows_;
    const int block_keys = static_cast<int>(problem.keys < kKeyBlock ? round_up(problem.keys, kTileKeys) : kKeyBlock);
    queries_ = arena_.take<Packed>(Products::left_size(all_rows, head_dim_));
    keys_ = arena_.take<Packed>(Products::columns_size(block_keys, head_dim_));
    values_ = arena_.take<Packed>(Products::depth_size(block_keys, value_dim_));
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
      Products::pack_depth(key_rows(plan, values, problem.value.token_stride, value_dim_, first, count), padded,
                           values_);
      if (counters_ != nullptr) counters_->copied_keys += count;
      for (int h = 0; h < heads; ++h) {
        BiasReader<T> bias;
        if (problem.bias.defined()) {
          bias = BiasReader<T>(problem.bias, batch, head + h, plan);
          bias.load_block(first, count, bias_block_);
        }
        const bool is_last = first + kKeyBlock >= plan.key_count;
        const T* results = is_last ? head_tokens<T>(problem.out, batch, head + h) : nullptr;
        for (int tile = 0; tile < plan.row_tiles(); ++tile) attend_tile(plan, h, tile, first, padded, bias, results);
      }
    }
    for (int h = 0; h < heads; ++h) finish(plan, batch, head + h, h);
  }

  // One row tile of local head `h` against the packed keys, which are the listed ones from `first` on. `results`: the
  // head's rows of out if they are written next, else null.
  void attend_tile(const ChunkPlan& plan, int h, int row_tile, int first, int padded, const BiasReader<T>& bias,
                   const T* results) {
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
      const float block_maximum =
          make_scores(rule_, plan, row_begin + row, classes, key_tiles, first, bias, scores_ + row * kScoreStride);
      raise_maximum(block_maximum, out_stride_, &maxima_[at + row], &sums_[at + row],
                    out + static_cast<std::int64_t>(row) * out_stride_);
      if (results != nullptr) {
        prefetch_row<1>(results + (plan.row_begin + row_begin + row) * problem_->out.token_stride, value_dim_);
      }
    }
    for (int row = 0; row < rows; ++row) {
      exponentiate<Products>(rule_, bias.defined(), classes, key_tiles, maxima_[at + row], scores_ + row * kScoreStride,
                             &sums_[at + row]);
    }
    for_each_run(classes, key_tiles, [&](int begin, int end) {
      Products::accumulate_rows(scores_, rows, values_, padded, value_dim_, begin * kTileKeys, end * kTileKeys, out);
    });
  }

  void finish(const ChunkPlan& plan, std::int64_t batch, std::int64_t head, int h) {
    for (int row = 0; row < plan.rows; ++row) {
      const std::int64_t at = h * padded_rows_ + row;
      write_row<T>(*problem_, batch, head, plan.row_begin + row, maxima_[at], sums_[at], out_ + at * out_stride_);
    }
  }

  Arena arena_;
  ChunkPlanner planner_;
  ScoreRule rule_;
  int head_dim_, value_dim_, out_stride_, padded_rows_;
  const ForwardProblem* problem_ = nullptr;
  AttentionCounters* counters_ = nullptr;
  Packed *queries_, *keys_, *values_;
  float *out_, *maxima_, *sums_, *scores_, *bias_block_;
};

}  // namespace
}  // namespace flash_dmattn::internal::cpu
