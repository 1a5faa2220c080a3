#include "plan/chunk_plan.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/arena.h"

namespace flash_dmattn::internal {
namespace {

int padded_rows(int rows, int row_tile) { return (rows + row_tile - 1) / row_tile * row_tile; }

struct Scratch {
  std::int32_t* prefix;
  std::int32_t* keys;
  std::int32_t* entries;
  IntervalIndex index;
  std::uint64_t* row_bits;
  std::uint64_t* mask_bits;
  std::uint64_t* key_union;
  std::uint64_t* bits;
  TileClass* classes;
  std::size_t bytes;
};

Scratch take_scratch(const AttentionProblem& problem, int chunk_rows, int row_tile, std::int64_t keys, bool has_index,
                     void* block) {
  Arena arena(block);
  const auto rows = static_cast<std::size_t>(padded_rows(chunk_rows, row_tile));
  const auto words = static_cast<std::size_t>(words_for(keys));
  Scratch scratch{};
  scratch.prefix = arena.take<std::int32_t>(rows);
  scratch.classes = arena.take<TileClass>(rows / row_tile * words);
  const bool has_intervals = problem.visibility.intervals.defined();
  const bool has_mask = problem.visibility.mask.defined(), has_lists = problem.visibility.indices.defined();
  if (has_intervals) {
    scratch.entries = arena.take<std::int32_t>(static_cast<std::size_t>(keys));
    if (has_index) scratch.index = take_index(arena, keys);
    scratch.row_bits = arena.take<std::uint64_t>(words);
  }
  if (has_mask && has_lists) scratch.mask_bits = arena.take<std::uint64_t>(words);
  if (has_mask || has_lists || has_intervals) {
    scratch.keys = arena.take<std::int32_t>(static_cast<std::size_t>(keys));
    scratch.key_union = arena.take<std::uint64_t>(words);
  }
  if (needs_bitmap(problem.visibility)) scratch.bits = arena.take<std::uint64_t>(rows * words);
  scratch.bytes = arena.used();
  return scratch;
}

}  // namespace

bool differs_by_row_and_key(const VisibilityViews& visibility) {
  const BroadcastView& mask = visibility.mask;
  const IndexViews& indices = visibility.indices;
  const bool mask_differs_by_row = mask.defined() && mask.row_stride != 0;
  if (indices.defined()) return mask_differs_by_row || indices.differ_by_row();
  return mask_differs_by_row && mask.key_stride != 0;
}

bool differs_by_head(const VisibilityViews& visibility) {
  const BroadcastView& mask = visibility.mask;
  const IndexViews& indices = visibility.indices;
  return mask.head_stride != 0 || indices.entries.head_stride != 0 || indices.lengths.head_stride != 0;
}

bool needs_bitmap(const VisibilityViews& visibility) {
  return differs_by_row_and_key(visibility) || visibility.intervals.defined();
}

std::int64_t count_visible(const ChunkPlan& plan) {
  std::int64_t count = 0;
  for (int row = 0; row < plan.rows; ++row) {
    if (plan.bits == nullptr) {
      count += plan.prefix[row];
    } else {
      for (int tile = 0; tile < plan.key_tiles(); ++tile) count += std::popcount(plan.visible(row, tile));
    }
  }
  return count;
}

void count_plan(const ChunkPlan& plan, int heads, AttentionCounters* counters) {
  counters->kept_scores += count_visible(plan) * heads;
  counters->plans += 1;
  counters->lists += plan.keys != nullptr;
  counters->bitmaps += plan.bits != nullptr;
}

void count_visited_tiles(const ChunkPlan& plan, int heads, AttentionCounters* counters) {
  for (int row_tile = 0; row_tile < plan.row_tiles(); ++row_tile) {
    const int rows = std::min(plan.row_tile, plan.rows - row_tile * plan.row_tile);
    for (int key_tile = 0; key_tile < plan.key_tiles(); ++key_tile) {
      const TileClass tile = plan.tile_class(row_tile, key_tile);
      if (tile == TileClass::kEmpty) continue;
      counters->tiles_visited += heads;
      counters->tiles_partial += tile == TileClass::kPartial ? heads : 0;
      counters->computed_scores += static_cast<std::int64_t>(heads) * rows * kTileKeys;
    }
  }
}

// Every rule lists exactly the keys that some row of the chunk sees. Neighbouring keys stay a range, any others
// become a list: kernels copy the keys of a chunk into tiles in either case, while each key left out saves its
// products with all rows of the chunk. Measured on the CPU, with one key of the range hidden: a list takes as long
// as the range (within 1%), but 10 to 19% longer with a bias for every score, whose rows are gathered then. That is
// not a reason to keep a range, in which hidden keys, whose numbers may be NaN, would have to be left out all the same.
const char* plan_rule(const VisibilityViews& visibility) {
  const bool has_intervals = visibility.intervals.defined();
  if (visibility.indices.defined()) {
    return needs_bitmap(visibility) ? "lists of keys: keys that a row sees, listed unless neighbours; a bitmap"
                                    : "one list of keys: its keys listed unless neighbours; every row a prefix";
  }
  if (has_intervals && !visibility.mask.defined()) {
    return "intervals: keys listed by when they leave, unless they are neighbours; a bitmap";
  }
  if (has_intervals) return "intervals and mask: keys that a row sees, listed unless neighbours; a bitmap";
  if (differs_by_row_and_key(visibility)) {
    return "mask by row and key: keys that a row sees, listed unless neighbours; a bitmap";
  }
  if (visibility.mask.defined() && visibility.mask.key_stride != 0) {
    return "mask by key: visible keys listed unless neighbours; every row a prefix";
  }
  return "no mask by key: a range; every row a prefix";
}

std::size_t ChunkPlanner::scratch_bytes(const AttentionProblem& problem, int chunk_rows, int row_tile) {
  return take_scratch(problem, chunk_rows, row_tile, problem.keys, false, nullptr).bytes;
}

std::size_t ChunkPlanner::span_scratch_bytes(const AttentionProblem& problem, int chunk_rows, int row_tile,
                                             std::int64_t span_keys) {
  return take_scratch(problem, chunk_rows, row_tile, span_keys, true, nullptr).bytes;
}

ChunkPlanner::ChunkPlanner(const AttentionProblem& problem, const IntervalIndices& indices, int chunk_rows,
                           int row_tile, void* scratch)
    : ChunkPlanner(problem, &indices, nullptr, chunk_rows, row_tile, problem.keys, scratch) {}

ChunkPlanner::ChunkPlanner(const AttentionProblem& problem, const IndexRows& lists, int chunk_rows, int row_tile,
                           std::int64_t span_keys, void* scratch)
    : ChunkPlanner(problem, nullptr, &lists, chunk_rows, row_tile, span_keys, scratch) {}

ChunkPlanner::ChunkPlanner(const AttentionProblem& problem, const IntervalIndices* indices, const IndexRows* lists,
                           int chunk_rows, int row_tile, std::int64_t keys, void* block)
    : problem_(problem), indices_(indices), lists_(lists) {
  const Scratch scratch = take_scratch(problem, chunk_rows, row_tile, keys, indices == nullptr, block);
  prefix_ = scratch.prefix;
  keys_ = scratch.keys;
  entries_ = scratch.entries;
  index_ = scratch.index;
  union_ = scratch.key_union;
  row_bits_ = scratch.row_bits;
  mask_bits_ = scratch.mask_bits;
  bits_ = scratch.bits;
  classes_ = scratch.classes;
  plan_.row_tile = row_tile;
}

IntervalIndex ChunkPlanner::index_of(std::int64_t batch, std::int64_t head, KeySpan span) const {
  if (indices_ != nullptr) return indices_->of(batch, head);
  build_index(problem_, batch, head, span, index_);
  return index_;
}

const ChunkPlan& ChunkPlanner::plan(std::int64_t batch, std::int64_t head, std::int64_t row_begin, int rows) {
  return plan(batch, head, row_begin, rows, {0, problem_.keys});
}

const ChunkPlan& ChunkPlanner::plan(std::int64_t batch, std::int64_t head, std::int64_t row_begin, int rows,
                                    KeySpan span) {
  const BroadcastView& mask = problem_.visibility.mask;
  const IntervalViews& intervals = problem_.visibility.intervals;
  const IndexViews& indices = problem_.visibility.indices;
  Source source;
  source.key_limit = problem_.key_count(batch);
  source.row_begin = row_begin;
  source.span = span;
  source.rows = rows;
  if (mask.defined()) {
    source.mask = static_cast<const std::uint8_t*>(mask.data) + mask.offset(batch, head) + row_begin * mask.row_stride +
                  span.begin * mask.key_stride;
  }
  if (intervals.defined()) {
    source.begins = static_cast<const std::int32_t*>(intervals.begin.data) + intervals.begin.offset(batch, head);
    source.ends = static_cast<const std::int32_t*>(intervals.end.data) + intervals.end.offset(batch, head);
  }
  if (indices.defined()) {
    source.lists = row_lists(indices, batch, head, row_begin);
    if (lists_ != nullptr) source.packed_lists = lists_->row(batch, head, row_begin);
  }
  if (source == source_) return plan_;
  source_ = source;

  plan_.row_begin = row_begin;
  plan_.rows = rows;
  plan_.key_begin = span.begin;
  plan_.keys = nullptr;
  plan_.prefix = prefix_;
  plan_.bits = nullptr;
  plan_.classes = classes_;
  if (intervals.defined()) {
    const IntervalIndex index = index_of(batch, head, span);
    if (mask.defined() || indices.defined()) {
      plan_bitmap(&index);
    } else {
      plan_intervals(index);
    }
  } else if (differs_by_row_and_key(problem_.visibility)) {
    plan_bitmap(nullptr);
  } else if (indices.defined() || (mask.defined() && mask.key_stride != 0)) {
    plan_key_list();
  } else {
    plan_prefixes();
  }
  classify();
  return plan_;
}

std::int64_t ChunkPlanner::allowed_keys(std::int64_t row) const {
  std::int64_t limit = source_.key_limit;
  if (problem_.visibility.is_causal) limit = std::min(limit, row + source_.key_limit - problem_.rows + 1);
  return std::clamp<std::int64_t>(limit, source_.span.begin, source_.span.end) - source_.span.begin;
}

void ChunkPlanner::load_mask_row(int row, std::int64_t limit, std::uint64_t* words) const {
  const BroadcastView& mask = problem_.visibility.mask;
  pack_bools(source_.mask + row * mask.row_stride, mask.key_stride, limit, words);
}

void ChunkPlanner::load_list(int row, std::int64_t limit, std::uint64_t* words) const {
  const std::int64_t count = words_for(limit);
  if (lists_ == nullptr) {
    std::fill_n(words, count, 0);
    const KeySpan keys = {source_.span.begin, source_.span.begin + limit};
    return set_listed_bits(problem_.visibility.indices, source_.lists, row, keys, words);
  }
  // Spans begin with a word.
  std::copy_n(source_.packed_lists + row * lists_->row_pitch() + source_.span.begin / kWordBits, count, words);
  if (count > 0) words[count - 1] &= low_bits(limit - (count - 1) * kWordBits);
}

void ChunkPlanner::load_row(int row, std::int64_t limit, std::uint64_t* words) {
  if (!problem_.visibility.indices.defined()) return load_mask_row(row, limit, words);
  load_list(row, limit, words);
  if (source_.mask == nullptr) return;
  load_mask_row(row, limit, mask_bits_);
  for (std::int64_t word = 0; word < words_for(limit); ++word) words[word] &= mask_bits_[word];
}

void ChunkPlanner::plan_prefixes() {
  plan_.key_count = 0;
  for (int row = 0; row < plan_.rows; ++row) {
    const bool row_visible = source_.mask == nullptr || source_.mask[row * problem_.visibility.mask.row_stride] != 0;
    prefix_[row] = row_visible ? static_cast<std::int32_t>(allowed_keys(plan_.row_begin + row)) : 0;
    plan_.key_count = std::max(plan_.key_count, prefix_[row]);
  }
}

void ChunkPlanner::plan_key_list() {
  const std::int64_t limit = allowed_keys(plan_.row_begin + plan_.rows - 1);
  load_row(0, limit, union_);
  list_keys(union_, words_for(limit));
  // Limits grow with the row: one walk over the list ranks them all.
  std::int32_t rank = 0;
  for (int row = 0; row < plan_.rows; ++row) {
    const std::int64_t row_limit = source_.span.begin + allowed_keys(plan_.row_begin + row);
    while (rank < plan_.key_count && plan_.key(rank) < row_limit) ++rank;
    prefix_[row] = rank;
  }
}

void ChunkPlanner::plan_bitmap(const IntervalIndex* index) {
  const std::int64_t words = words_for(allowed_keys(plan_.row_begin + plan_.rows - 1));
  if (index != nullptr) {
    std::int64_t count = 0;
    for (; count < *index->count && index->keys[count] < source_.span.begin + words * kWordBits; ++count) {
      entries_[count] = static_cast<std::int32_t>(count);
    }
    spread_intervals(*index, entries_, count, true, words);
  }
  std::fill_n(union_, words, 0);
  for (int row = 0; row < plan_.rows; ++row) {
    const std::int64_t limit = allowed_keys(plan_.row_begin + row);
    std::uint64_t* bits = bits_ + row * words;
    std::uint64_t* row_bits = index != nullptr ? row_bits_ : bits;
    load_row(row, limit, row_bits);
    std::fill(row_bits + words_for(limit), row_bits + words, 0);
    for (std::int64_t word = 0; word < words; ++word) {
      bits[word] &= row_bits[word];  // itself without intervals
      union_[word] |= bits[word];
    }
  }
  list_keys(union_, words);
  const bool already_compact = plan_.keys == nullptr && plan_.key_begin == source_.span.begin;
  for (int row = 0; row < plan_.rows && !already_compact; ++row) compact_bits(union_, words, bits_ + row * words);
  plan_.bits = bits_;
  plan_.bits_pitch = words;
}

// The keys that the chunk's first row sees in front, those that stay longest first (by the row tile in which
// they leave, which is all that tiles can tell); then those that come later, as they come.
void ChunkPlanner::plan_intervals(const IntervalIndex& index) {
  const std::int64_t row_begin = plan_.row_begin, row_end = row_begin + plan_.rows;
  const auto for_each_entry = [&](auto use) {
    for (std::int64_t first = 0; first < *index.count; first += kIndexBlock) {
      const std::int64_t block = first / kIndexBlock;
      if (index.block_begins[block] >= row_end || index.block_ends[block] <= row_begin) continue;
      const std::int64_t last = std::min(first + kIndexBlock, *index.count);
      for (std::int64_t entry = first; entry < last; ++entry) {
        if (index.begins[entry] < row_end && index.ends[entry] > row_begin) use(static_cast<std::int32_t>(entry));
      }
    }
  };
  // Survivors of the whole chunk are in group 0, those that leave in its last row tile in group 1, and so on.
  constexpr int kMaxGroups = 64;
  const int groups = std::min(plan_.row_tiles() + 1, kMaxGroups);
  const auto group_of = [&](std::int32_t entry) {
    if (index.begins[entry] > row_begin) return groups;
    if (index.ends[entry] >= row_end) return 0;
    const auto tile = static_cast<int>((index.ends[entry] - row_begin - 1) / plan_.row_tile);
    return std::max(groups - 1 - tile, 1);
  };
  std::int32_t starts[kMaxGroups + 2] = {};
  std::int32_t lowest = 0, highest = -1, count = 0;
  for_each_entry([&](std::int32_t entry) {
    if (count++ == 0) lowest = index.keys[entry];
    highest = index.keys[entry];
    ++starts[group_of(entry) + 1];
  });
  plan_.key_count = count;
  plan_.key_begin = lowest;
  const bool is_range = highest - lowest + 1 == count;
  plan_.keys = is_range ? nullptr : keys_;
  for (int group = 0; group < groups; ++group) starts[group + 1] += starts[group];
  std::int32_t next = 0;
  for_each_entry([&](std::int32_t entry) { entries_[is_range ? next++ : starts[group_of(entry)]++] = entry; });
  for (std::int32_t i = 0; i < count && !is_range; ++i) keys_[i] = index.keys[entries_[i]];
  const std::int64_t words = words_for(count);
  spread_intervals(index, entries_, count, false, words);
  plan_.bits = bits_;
  plan_.bits_pitch = words;
}

// The bitmap of the `count` entries: bit i is entry i, or with `by_key` its key's place in the span. A bit changes
// where its interval begins and ends, so each row is the row before with those changes.
void ChunkPlanner::spread_intervals(const IntervalIndex& index, const std::int32_t* entries, std::int64_t count,
                                    bool by_key, std::int64_t words) {
  std::fill_n(bits_, plan_.rows * words, 0);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t entry = entries[i];
    const std::int64_t position = by_key ? index.keys[entry] - source_.span.begin : i;
    const std::int64_t begin = std::max<std::int64_t>(index.begins[entry] - plan_.row_begin, 0);
    const std::int64_t end = index.ends[entry] - plan_.row_begin;
    if (begin >= plan_.rows || end <= begin) continue;
    const std::uint64_t bit = std::uint64_t{1} << (position % kWordBits);
    bits_[begin * words + position / kWordBits] ^= bit;
    if (end < plan_.rows) bits_[end * words + position / kWordBits] ^= bit;
  }
  for (std::int64_t at = words; at < plan_.rows * words; ++at) bits_[at] ^= bits_[at - words];
}

void ChunkPlanner::list_keys(const std::uint64_t* seen, std::int64_t words) {
  plan_.key_count = static_cast<std::int32_t>(list_bits(seen, words, source_.span.begin, keys_));
  if (plan_.key_count > 0) plan_.key_begin = keys_[0];
  const bool is_range = plan_.key_count == 0 || keys_[plan_.key_count - 1] - plan_.key_begin + 1 == plan_.key_count;
  plan_.keys = is_range ? nullptr : keys_;
}

void ChunkPlanner::classify() {
  const int tiles = plan_.key_tiles();
  for (int row_tile = 0; row_tile < plan_.row_tiles(); ++row_tile) {
    const int first = row_tile * plan_.row_tile;
    const int end = std::min(first + plan_.row_tile, plan_.rows);
    TileClass* classes = classes_ + static_cast<std::int64_t>(row_tile) * tiles;
    std::int32_t least = 0, most = 0;
    if (plan_.bits == nullptr) {
      const auto [low, high] = std::minmax_element(prefix_ + first, prefix_ + end);
      least = *low;
      most = *high;
    }
    for (int tile = 0; tile < tiles; ++tile) {
      const std::int64_t key = static_cast<std::int64_t>(tile) * kTileKeys;
      std::uint64_t any = low_bits(most - key), all = low_bits(least - key);
      if (plan_.bits != nullptr) {
        any = 0;
        all = ~std::uint64_t{0};
        for (int row = first; row < end; ++row) {
          any |= plan_.visible(row, tile);
          all &= plan_.visible(row, tile);
        }
      }
      // A tile of fewer keys than its width is never full: what lies beyond must be masked off.
      classes[tile] = any == 0 ? TileClass::kEmpty : ~all == 0 ? TileClass::kFull : TileClass::kPartial;
    }
  }
}

}  // namespace flash_dmattn::internal
