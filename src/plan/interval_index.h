// Intervals of rows per key, made ready for planning: one pass per head leaves out the keys that no row sees
// and notes, block by block, which rows see any of the rest, so that a chunk of rows finds its keys without
// looking at all of them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/arena.h"
#include "core/problem.h"

namespace flash_dmattn::internal {

constexpr int kIndexBlock = 64;  // entries that are skipped together

// The keys of one (batch, head) that some row sees, by index. An entry's interval already obeys lengths and
// the causal rule, and is not empty.
struct IntervalIndex {
  std::int32_t* keys = nullptr;
  std::int32_t* begins = nullptr;
  std::int32_t* ends = nullptr;
  std::int32_t* block_begins = nullptr;  // lowest begin of kIndexBlock entries
  std::int32_t* block_ends = nullptr;    // highest end
  std::int64_t* count = nullptr;
};

// Some neighbouring keys.
struct KeySpan {
  std::int64_t begin = 0, end = 0;
  bool operator==(const KeySpan&) const = default;
};

// An index of up to `keys` keys in memory of the arena, and what it says of those of the span, for query head `head`.
IntervalIndex take_index(Arena&, std::int64_t keys);
void build_index(const AttentionProblem&, std::int64_t batch, std::int64_t head, KeySpan, const IntervalIndex&);

// All indices of a problem, in memory that they share: 12 bytes a key and head.
class IntervalIndices {
 public:
  static std::size_t bytes(const AttentionProblem&);

  IntervalIndices(const AttentionProblem&, void* memory);

  std::int64_t size() const { return batches_ * heads_; }  // 0 without intervals
  void build(std::int64_t position) const;                 // each before its first use; independent of each other
  IntervalIndex of(std::int64_t batch, std::int64_t head) const;

 private:
  IntervalIndex at(std::int64_t position) const;

  const AttentionProblem& problem_;
  std::byte* memory_;
  std::int64_t batches_ = 0, heads_ = 0;
};

}  // namespace flash_dmattn::internal
