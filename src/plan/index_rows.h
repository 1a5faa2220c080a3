// Lists of keys per query row as packed bits, which plans are made of.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.h"
#include "plan/bits.h"
#include "plan/interval_index.h"

namespace flash_dmattn::internal {

// The lists of query head `head` from a row on. Equal pointers are equal lists.
struct RowLists {
  const std::int32_t* entries = nullptr;
  const std::int32_t* lengths = nullptr;  // null: whole lists count
  bool operator==(const RowLists&) const = default;
};
RowLists row_lists(const IndexViews&, std::int64_t batch, std::int64_t head, std::int64_t row);

// Sets in `words` the bits of the span's keys that list `row` of these names; bit 0 is the span's first key. The other
// bits are left as they are.
void set_listed_bits(const IndexViews&, const RowLists&, std::int64_t row, KeySpan, std::uint64_t* words);

// The lists of all rows, for calls of few rows: those look at some keys at a time, and would read whole lists for each.
class IndexRows {
 public:
  static std::size_t bytes(const AttentionProblem&);  // 0 without lists

  IndexRows() = default;
  IndexRows(const AttentionProblem&, void* memory);

  std::int64_t size() const { return problem_ == nullptr ? 0 : batches_ * heads_ * rows_; }
  void build(std::int64_t position) const;  // each before its first use; independent of each other
  // words_for(keys) words of query head `head`; null without lists.
  const std::uint64_t* row(std::int64_t batch, std::int64_t head, std::int64_t row) const;
  std::int64_t row_pitch() const { return rows_ > 1 ? words_for(problem_->keys) : 0; }  // words from row to row

 private:
  const AttentionProblem* problem_ = nullptr;
  std::uint64_t* words_ = nullptr;
  std::int64_t batches_ = 0, heads_ = 0, rows_ = 0;
};

}  // namespace flash_dmattn::internal
