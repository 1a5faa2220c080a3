#include "plan/interval_index.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "plan/bits.h"

namespace flash_dmattn::internal {
namespace {

// Which of up to 64 keys with these intervals some of the rows sees.
std::uint64_t seen_keys(const std::int32_t* begins, const std::int32_t* ends, std::int64_t count, std::int64_t rows) {
  const auto last = static_cast<std::int32_t>(std::min<std::int64_t>(rows, std::numeric_limits<std::int32_t>::max()));
  std::uint8_t seen[kWordBits];
  for (std::int64_t i = 0; i < count; ++i) seen[i] = std::max(begins[i], 0) < std::min(ends[i], last);
  std::uint64_t word = 0;
  pack_bools(seen, 1, count, &word);
  return word;
}

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
  const bool neighbours = begin_view.key_stride == 1 && end_view.key_stride == 1;
  const std::int64_t existing = problem.key_count(batch);
  const std::int64_t history = existing - problem.rows;
  const std::int64_t span_end = std::min(span.end, existing);
  std::int64_t count = 0;
  for (std::int64_t first = span.begin; first < span_end; first += kWordBits) {
    const std::int64_t last = std::min(first + kWordBits, span_end);
    // Keys that no row sees leave here, without a look at each where the causal rule hides none of them.
    std::uint64_t seen = low_bits(last - first);
    const bool in_history = !problem.visibility.is_causal || last <= history + 1;
    if (neighbours && in_history) seen = seen_keys(begins + first, ends + first, last - first, problem.rows);
    for (; seen != 0; seen &= seen - 1) {
      const std::int64_t key = first + std::countr_zero(seen);
      const std::int64_t earliest = in_history ? 0 : std::max<std::int64_t>(key - history, 0);
      const std::int64_t begin = std::max<std::int64_t>(begins[key * begin_view.key_stride], earliest);
      const std::int64_t end = std::min<std::int64_t>(ends[key * end_view.key_stride], problem.rows);
      if (begin >= end) continue;
      index.keys[count] = static_cast<std::int32_t>(key);
      index.begins[count] = static_cast<std::int32_t>(begin);
      index.ends[count] = static_cast<std::int32_t>(end);
      ++count;
    }
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
