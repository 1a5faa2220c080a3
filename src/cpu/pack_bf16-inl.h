// bfloat16 operands in words of two: the form that both the dot-product and the matrix-tile instructions
// read. Only for instruction sets with AVX-512 and its bfloat16 conversions.
#pragma once

#include <immintrin.h>

#include "cpu/config.h"
#include "cpu/pack-inl.h"

namespace flash_dmattn::internal::cpu {
namespace {

static_assert(kLanes == 16, "panels of bfloat16 pairs are one 512-bit vector wide");

using Pair = std::uint32_t;  // the lower half is the earlier element

// The row as `pairs` words, zero-filled beyond head_dim: in place where possible, else in the buffer.
HWY_INLINE const Pair* fetch_pairs(const RowSource<Bf16>& source, int row, int pairs, Pair* buffer) {
  source.prefetch_ahead(row);
  const Bf16* from = source.row(row);
  const bool in_place = source.head_dim == 2 * pairs && reinterpret_cast<std::uintptr_t>(from) % sizeof(Pair) == 0;
  if (from != nullptr && in_place) return reinterpret_cast<const Pair*>(from);
  std::memset(buffer, 0, static_cast<std::size_t>(pairs) * sizeof(Pair));
  if (from != nullptr) std::memcpy(buffer, from, static_cast<std::size_t>(source.head_dim) * sizeof(Bf16));
  return buffer;
}

// Pairs of rows that follow each other in the summation: [panel of 16 columns][padded_rows / 2][16] words;
// columns beyond head_dim are zeros.
HWY_INLINE void pack_row_pairs(const RowSource<Bf16>& source, int padded_rows, Pair* HWY_RESTRICT panels) {
  const hn::FixedTag<std::uint16_t, 8> halves;
  const int columns = static_cast<int>(round_up(source.head_dim, kLanes));
  Pair buffers[2][kMaxHeadDim / 2];
  for (int row = 0; row < padded_rows; row += 2) {
    const auto* even = reinterpret_cast<const std::uint16_t*>(fetch_pairs(source, row, columns / 2, buffers[0]));
    const auto* odd = reinterpret_cast<const std::uint16_t*>(fetch_pairs(source, row + 1, columns / 2, buffers[1]));
    for (int column = 0; column < columns; column += 8) {
      const auto first = hn::LoadU(halves, even + column), second = hn::LoadU(halves, odd + column);
      Pair* to = panels + static_cast<std::int64_t>(column / kLanes) * (padded_rows / 2) * kLanes + row / 2 * kLanes +
                 column % kLanes;
      hn::StoreU(hn::InterleaveLower(halves, first, second), halves, reinterpret_cast<std::uint16_t*>(to));
      hn::StoreU(hn::InterleaveUpper(halves, first, second), halves, reinterpret_cast<std::uint16_t*>(to + 4));
    }
  }
}

// Overwrites floats at scores[key...] by bfloat16 at half the offset: behind what is still to be read when
// a row is walked in ascending order.
HWY_INLINE void store_bf16(Vec v, float* scores, int key) {
  const __m256bh rounded = _mm512_cvtneps_pbh(v.raw);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(reinterpret_cast<std::uint16_t*>(scores) + key),
                      reinterpret_cast<const __m256i&>(rounded));
}

// Rows of bfloat16, as store_bf16 leaves them, for keys [begin, end): pairs of rows, as words that are
// kScoreStride apart from pair to pair. Rows from `rows` to `padded_rows` are zeros.
HWY_INLINE void pair_rows(const float* scores, int rows, int padded_rows, int begin, int end, Pair* HWY_RESTRICT to) {
  const __m256i zero = _mm256_setzero_si256();
  for (int row = 0; row < padded_rows; row += 2, to += kScoreStride) {
    const auto* even = reinterpret_cast<const std::uint16_t*>(scores + row * kScoreStride);
    const auto* odd = reinterpret_cast<const std::uint16_t*>(scores + (row + 1) * kScoreStride);
    for (int key = begin; key < end; key += 16) {
      const __m256i low = row < rows ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(even + key)) : zero;
      const __m256i high = row + 1 < rows ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd + key)) : zero;
      const __m512i words =
          _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
      _mm512_store_si512(to + key, words);
    }
  }
}

constexpr int kPairedScores = kBackwardRowTile / 2 * kScoreStride;  // words that pair_rows writes at most

}  // namespace
}  // namespace flash_dmattn::internal::cpu
