#include "plan/index_rows.h"

#include <algorithm>

#include "plan/bits.h"

namespace flash_dmattn::internal {
namespace {

// Sets bits [begin, end).
void set_bits(std::int64_t begin, std::int64_t end, std::uint64_t* words) {
  while (begin < end) {
    const std::int64_t word = begin / kWordBits;
    const std::int64_t word_end = std::min((word + 1) * kWordBits, end);
    words[word] |= low_bits(word_end - begin) << (begin % kWordBits);
    begin = word_end;
  }
}

// Of the two tensors the finer one.
std::int64_t index_batches(const IndexViews& indices) {
  return std::max(indices.entries.batches, indices.lengths.batches);
}
std::int64_t index_heads(const IndexViews& indices) { return std::max(indices.entries.heads, indices.lengths.heads); }
std::int64_t index_rows(const IndexViews& indices) { return std::max(indices.entries.rows, indices.lengths.rows); }

}  // namespace

RowLists row_lists(const IndexViews& indices, std::int64_t batch, std::int64_t head, std::int64_t row) {
  const auto from_row = [&](const BroadcastView& view) {
    return static_cast<const std::int32_t*>(view.data) + view.offset(batch, head) + row * view.row_stride;
  };
  const bool has_lengths = indices.lengths.defined();
  return {indices.entries.defined() ? from_row(indices.entries) : nullptr,
          has_lengths ? from_row(indices.lengths) : nullptr};
}

void set_listed_bits(const IndexViews& indices, const RowLists& lists, std::int64_t row, KeySpan span,
                     std::uint64_t* words) {
  const BroadcastView& entries = indices.entries;
  std::int64_t count = entries.keys;
  if (lists.lengths != nullptr) {
    count = std::clamp<std::int64_t>(lists.lengths[row * indices.lengths.row_stride], 0, count);
  }
  const std::int32_t* list = lists.entries + row * entries.row_stride;
  const auto keys = static_cast<std::uint64_t>(span.end - span.begin);
  if (indices.block_size == 1) {
    for (std::int64_t i = 0; i < count; ++i) {
      // Unsigned, keys before the span are beyond all others.
      const auto key = static_cast<std::uint64_t>(list[i * entries.key_stride] - span.begin);
      if (key < keys) words[key / kWordBits] |= std::uint64_t{1} << (key % kWordBits);
    }
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    // A negative entry ends with key 0 or before it.
    const std::int64_t begin = list[i * entries.key_stride] * indices.block_size, end = begin + indices.block_size;
    set_bits(std::max(begin, span.begin) - span.begin, std::min(end, span.end) - span.begin, words);
  }
}

std::size_t IndexRows::bytes(const AttentionProblem& problem) {
  const IndexViews& indices = problem.visibility.indices;
  if (!indices.defined()) return 0;
  const std::int64_t rows = index_batches(indices) * index_heads(indices) * index_rows(indices);
  return static_cast<std::size_t>(rows * words_for(problem.keys)) * sizeof(std::uint64_t);
}

IndexRows::IndexRows(const AttentionProblem& problem, void* memory) {
  const IndexViews& indices = problem.visibility.indices;
  if (!indices.defined()) return;
  problem_ = &problem;
  words_ = static_cast<std::uint64_t*>(memory);
  batches_ = index_batches(indices);
  heads_ = index_heads(indices);
  rows_ = index_rows(indices);
}

void IndexRows::build(std::int64_t position) const {
  const std::int64_t words = words_for(problem_->keys);
  std::uint64_t* row_words = words_ + position * words;
  std::fill_n(row_words, words, 0);
  const std::int64_t pair = position / rows_;
  const std::int64_t head = pair % heads_ * (problem_->heads / heads_);  // the first query head that reads it
  const IndexViews& indices = problem_->visibility.indices;
  set_listed_bits(indices, row_lists(indices, pair / heads_, head, position % rows_), 0, {0, problem_->keys},
                  row_words);
}

const std::uint64_t* IndexRows::row(std::int64_t batch, std::int64_t head, std::int64_t row) const {
  if (problem_ == nullptr) return nullptr;
  const std::int64_t pair = (batches_ > 1 ? batch : 0) * heads_ + head * heads_ / problem_->heads;
  return words_ + pair * rows_ * words_for(problem_->keys) + row * row_pitch();
}

}  // namespace flash_dmattn::internal
