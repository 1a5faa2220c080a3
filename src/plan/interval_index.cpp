#include "plan/interval_index.h"

#include <algorithm>

namespace flash_dmattn::internal {
namespace {

std::size_t index_bytes(std::int64_t keys) {
  Arena arena(nullptr);
  take_index(arena, keys);
  return arena.used();
}

std::int64_t index_batches(const AttentionProblem& problem) {
  const IntervalViews& intervals = problem.visibility.intervals;
  // Lengths clip intervals differently for each batch element.
  if (problem.visibility.seqlens != nullptr) return problem.batch;
  return std::max(intervals.begin.batches, intervals.end.batches);
}

std::int64_t index_heads(const AttentionProblem& problem) {
  return std::max(problem.visibility.intervals.begin.heads, problem.visibility.intervals.end.heads);
}

}  // namespace

IntervalIndex take_index(Arena& arena, std::int64_t keys) {
  const auto entries = static_cast<std::size_t>(keys);
  const auto blocks = static_cast<std::size_t>((keys + kIndexBlock - 1) / kIndexBlock);
  IntervalIndex index;
  index.keys = arena.take<std::int32_t>(entries);
  index.begins = arena.take<std::int32_t>(entries);
  index.ends = arena.take<std::int32_t>(entries);
  index.block_begins = arena.take<std::int32_t>(blocks);
  index.block_ends = arena.take<std::int32_t>(blocks);
  index.count = arena.take<std::int64_t>(1);
  return index;
}

void build_index(const AttentionProblem& problem, std::int64_t batch, std::int64_t head, KeySpan span,
                 const IntervalIndex& index) {
  const BroadcastView& begin_view = problem.visibility.intervals.begin;
  const BroadcastView& end_view = problem.visibility.intervals.end;
  const auto* begins = static_cast<const std::int32_t*>(begin_view.data) + begin_view.offset(batch, head);
  const auto* ends = static_cast<const std::int32_t*>(end_view.data) + end_view.offset(batch, head);
  const std::int64_t existing = problem.key_count(batch);
  const std::int64_t history = existing - problem.rows;
  std::int64_t count = 0;
  for (std::int64_t key = span.begin; key < std::min(span.end, existing); ++key) {
    const std::int64_t earliest = problem.visibility.is_causal ? std::max<std::int64_t>(key - history, 0) : 0;
    const std::int64_t begin = std::max<std::int64_t>(begins[key * begin_view.key_stride], earliest);
    const std::int64_t end = std::min<std::int64_t>(ends[key * end_view.key_stride], problem.rows);
    // Written in any case, since whether it counts is hard to foretell, and a wrong guess costs more.
    index.keys[count] = static_cast<std::int32_t>(key);
    index.begins[count] = static_cast<std::int32_t>(begin);
    index.ends[count] = static_cast<std::int32_t>(end);
    count += begin < end;
  }
  *index.count = count;
  for (std::int64_t first = 0; first < count; first += kIndexBlock) {
    const std::int64_t last = std::min(first + kIndexBlock, count);
    index.block_begins[first / kIndexBlock] = *std::min_element(index.begins + first, index.begins + last);
    index.block_ends[first / kIndexBlock] = *std::max_element(index.ends + first, index.ends + last);
  }
}

std::size_t IntervalIndices::bytes(const AttentionProblem& problem) {
  if (!problem.visibility.intervals.defined()) return 0;
  return static_cast<std::size_t>(index_batches(problem) * index_heads(problem)) * index_bytes(problem.keys);
}

IntervalIndices::IntervalIndices(const AttentionProblem& problem, void* memory)
    : problem_(problem), memory_(static_cast<std::byte*>(memory)) {
  if (!problem.visibility.intervals.defined()) return;
  batches_ = index_batches(problem);
  heads_ = index_heads(problem);
}

IntervalIndex IntervalIndices::at(std::int64_t position) const {
  Arena arena(memory_ + static_cast<std::size_t>(position) * index_bytes(problem_.keys));
  return take_index(arena, problem_.keys);
}

IntervalIndex IntervalIndices::of(std::int64_t batch, std::int64_t head) const {
  return at((batches_ > 1 ? batch : 0) * heads_ + head * heads_ / problem_.heads);
}

void IntervalIndices::build(std::int64_t position) const {
  const std::int64_t batch = position / heads_;
  const std::int64_t head = position % heads_ * (problem_.heads / heads_);  // the first query head that reads it
  build_index(problem_, batch, head, {0, problem_.keys}, at(position));
}

}  // namespace flash_dmattn::internal
