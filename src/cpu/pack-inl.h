// Copies rows of user tensors (queries, keys, values) into the layouts that the products read. Listed
// keys are gathered on the way, so a list costs no more than a range.
#pragma once

#include "core/rounding.h"
#include "cpu/simd-inl.h"
#include "plan/chunk_plan.h"

namespace flash_dmattn::internal::cpu {
namespace {

constexpr int kMaxHeadDim = 256;

// Rows of head_dim elements: those of one head of a tensor, every one or the listed ones. A row that is
// absent is read as zeros: padding, and rows whose values must not be touched.
template <typename T>
struct RowSource {
  const T* head = nullptr;  // row 0
  std::int64_t stride = 0;
  const std::int32_t* index = nullptr;  // null: rows begin, begin + 1, ...
  std::int64_t begin = 0;
  int count = 0;
  int head_dim = 0;
  const std::uint8_t* present = nullptr;  // per row, optional

  const T* row(int i) const {
    if (i >= count || (present != nullptr && present[i] == 0)) return nullptr;
    return head + (index != nullptr ? index[i] : begin + i) * stride;
  }

  // To be called for each row in turn: has one fetched that is read soon. Rows of a head lie a token apart, often on
  // different pages, across which the hardware does not look ahead.
  void prefetch_ahead(int i) const {
    constexpr int kRowsAhead = 4;
    const T* from = row(i + kRowsAhead);
    if (from != nullptr) prefetch_row(from, head_dim);
  }
};

// Listed keys [first, first + count) of a plan, as rows of `head`.
template <typename T>
HWY_INLINE RowSource<T> key_rows(const ChunkPlan& plan, const T* head, std::int64_t stride, int head_dim, int first,
                                 int count) {
  RowSource<T> rows;
  rows.head = head;
  rows.stride = stride;
  rows.index = plan.keys != nullptr ? plan.keys + first : nullptr;
  rows.begin = plan.key_begin + first;
  rows.count = count;
  rows.head_dim = head_dim;
  return rows;
}

// Four 32-bit values of each of four rows, transposed.
template <typename Word>
HWY_INLINE void transpose_4x4(const Word* const (&rows)[4], std::int64_t offset, Word* to, std::int64_t to_stride) {
  const hn::FixedTag<Word, 4> words;
  const auto row0 = hn::LoadU(words, rows[0] + offset), row1 = hn::LoadU(words, rows[1] + offset);
  const auto row2 = hn::LoadU(words, rows[2] + offset), row3 = hn::LoadU(words, rows[3] + offset);
  const auto low01 = hn::InterleaveLower(words, row0, row1), high01 = hn::InterleaveUpper(words, row0, row1);
  const auto low23 = hn::InterleaveLower(words, row2, row3), high23 = hn::InterleaveUpper(words, row2, row3);
  hn::StoreU(hn::ConcatLowerLower(words, low23, low01), words, to);
  hn::StoreU(hn::ConcatUpperUpper(words, low23, low01), words, to + to_stride);
  hn::StoreU(hn::ConcatLowerLower(words, high23, high01), words, to + 2 * to_stride);
  hn::StoreU(hn::ConcatUpperUpper(words, high23, high01), words, to + 3 * to_stride);
}

// Rows to panels [panel of kWidth rows][word][kWidth], zero-filled up to `padded_rows`, a multiple of
// kWidth. `fetch(i, buffer)` gives row i as `words` values, in place or in the buffer of at least
// round_up(words, 4).
template <int kWidth, typename Word, typename Fetch>
HWY_INLINE void transpose_rows(int padded_rows, int words, Fetch fetch, Word* HWY_RESTRICT panels) {
  Word buffers[4][kMaxHeadDim];
  for (int first = 0; first < padded_rows; first += 4) {
    const Word* rows[4];
    for (int i = 0; i < 4; ++i) rows[i] = fetch(first + i, buffers[i]);
    Word* to = panels + static_cast<std::int64_t>(first / kWidth) * kWidth * words + first % kWidth;
    int word = 0;
    for (; word + 4 <= words; word += 4)
      transpose_4x4(rows, word, to + static_cast<std::int64_t>(word) * kWidth, kWidth);
    for (; word < words; ++word) {
      for (int i = 0; i < 4; ++i) to[static_cast<std::int64_t>(word) * kWidth + i] = rows[i][word];
    }
  }
}

// The row as floats: in place if it is float already and present, else in the buffer.
template <typename T>
HWY_INLINE const float* fetch_floats(const RowSource<T>& source, int row, float* buffer) {
  source.prefetch_ahead(row);
  const T* from = source.row(row);
  if (from == nullptr) {
    fill_floats(buffer, source.head_dim, 0.0f);
    return buffer;
  }
  if constexpr (sizeof(T) == sizeof(float)) {
    return from;
  } else {
    convert_row(from, source.head_dim, buffer);
    return buffer;
  }
}

// Rows to float panels [panel of kLanes columns][padded_rows][kLanes]; columns beyond head_dim are zeros.
template <typename T>
HWY_INLINE void pack_rows(const RowSource<T>& source, int padded_rows, float* HWY_RESTRICT panels) {
  HWY_ALIGN float row_floats[kMaxHeadDim + kLanes];
  const int whole = source.head_dim / kLanes * kLanes;
  for (int row = 0; row < padded_rows; ++row) {
    const float* from = fetch_floats(source, row, row_floats);
    float* to = panels + static_cast<std::int64_t>(row) * kLanes;
    int column = 0;
    for (; column < whole; column += kLanes, to += static_cast<std::int64_t>(padded_rows) * kLanes) {
      hn::Store(hn::LoadU(kFloats, from + column), kFloats, to);
    }
    if (column < source.head_dim) {
      fill_floats(to, kLanes, 0.0f);
      std::memcpy(to, from + column, static_cast<std::size_t>(source.head_dim - column) * sizeof(float));
    }
  }
}

}  // namespace
}  // namespace flash_dmattn::internal::cpu
