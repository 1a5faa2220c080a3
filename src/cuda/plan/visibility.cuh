// Reading a Visibility on the device.
#pragma once

#include <initializer_list>

#include "cuda/plan/entry_offset.cuh"
#include "cuda/plan/visibility.h"

namespace flash_dmattn::internal::cuda {

__device__ inline std::int32_t key_count(const Visibility& visibility, std::int32_t batch) {
  if (visibility.seqlens == nullptr) return visibility.keys;
  return min(max(visibility.seqlens[batch * visibility.seqlens_stride], 0), visibility.keys);
}

// Keys [0, limit) are allowed by length and causal rule; `existing` is key_count of the batch element.
__device__ inline std::int32_t causal_limit(const Visibility& visibility, std::int32_t existing, std::int32_t row) {
  if (!visibility.is_causal) return existing;
  return min(max(row + 1 + existing - visibility.rows, 0), existing);
}

struct RowRange {
  std::int32_t begin, end;
};

// Where a head's entries begin. kBrief, of this and what follows: by a division of 32 bits (entry_offset.cuh), for
// kernels that have registers for it.
template <bool kBrief, typename View>
__device__ inline std::int64_t head_offset(const View& view, std::int64_t batch, std::int32_t head) {
  if constexpr (kBrief) return entry_offset(view, batch, head);
  return batch * view.batch_stride + head / view.head_divisor * view.head_stride;
}

// The rows that see `key`, packed mask aside. `existing` is key_count of the batch element; the key may be any.
template <bool kBrief = false>
__device__ inline RowRange visible_rows(const Visibility& visibility, std::int32_t batch, std::int32_t head,
                                        std::int32_t existing, std::int32_t key) {
  if (key < 0 || key >= existing) return {0, 0};
  RowRange range = {0, visibility.rows};
  if (visibility.is_causal) range.begin = max(0, key - (existing - visibility.rows));
  if (visibility.key_mask.defined()) {
    const BroadcastView& mask = visibility.key_mask;
    if (static_cast<const std::uint8_t*>(mask.data)[head_offset<kBrief>(mask, batch, head) + key * mask.key_stride] ==
        0) {
      return {0, 0};
    }
  }
  if (visibility.begin.defined()) {
    const BroadcastView &begin = visibility.begin, &end = visibility.end;
    range.begin = max(range.begin, static_cast<const std::int32_t*>(
                                       begin.data)[head_offset<kBrief>(begin, batch, head) + key * begin.key_stride]);
    range.end =
        min(range.end,
            static_cast<const std::int32_t*>(end.data)[head_offset<kBrief>(end, batch, head) + key * end.key_stride]);
    range.end = max(range.end, 0);  // so that differences to rows stay in range
  }
  return range;
}

// Bits [begin, end) of a word, each limit clamped to 0 ... 32.
__device__ inline std::uint32_t bit_range(std::int32_t begin, std::int32_t end) {
  begin = max(begin, 0);
  end = min(end, 32);
  if (begin >= end) return 0;
  return (~0u >> (32 - (end - begin))) << begin;
}

// Bit r: row first_row + r sees the key. `range` is its visible_rows; first_row is a multiple of kWordRows.
template <bool kBrief = false>
__device__ inline std::uint32_t visible_word(const Visibility& visibility, RowRange range, std::int32_t batch,
                                             std::int32_t head, std::int32_t key, std::int32_t first_row) {
  std::uint32_t word = bit_range(range.begin - first_row, range.end - first_row);
  if (word != 0 && visibility.packed.defined()) {
    const PackedMask& packed = visibility.packed;
    word &= *packed.words_at(head_offset<kBrief>(packed, batch, head), first_row, key);
  }
  return word;
}

// Whether a row of chunks [first_chunk, end_chunk) sees the key, exactly; where no mask is packed, whether any row
// does. `range` is the key's visible_rows.
template <bool kBrief = false>
__device__ inline bool any_row_sees(const Visibility& visibility, RowRange range, std::int32_t batch, std::int32_t head,
                                    std::int32_t key, std::int32_t first_chunk, std::int32_t end_chunk) {
  const PackedMask& packed = visibility.packed;
  if (range.begin >= range.end || !packed.defined()) return range.begin < range.end;
  const std::int64_t first = head_offset<kBrief>(packed, batch, head);
  for (std::int32_t chunk = max(first_chunk, range.begin / kChunkRows); chunk < end_chunk; ++chunk) {
    const std::uint32_t units =
        packed.units[first + std::int64_t{chunk} * packed.chunk_stride + key * packed.key_stride];
    const std::int32_t begin = max(range.begin - chunk * kChunkRows, 0);
    const std::int32_t end = min(range.end - chunk * kChunkRows, kChunkRows);
    if (end <= begin) break;
    if (units == 0) continue;
    if ((units & bit_range((begin + kUnitRows - 1) / kUnitRows, end / kUnitRows)) != 0) return true;
    // Units of which the range has a part.
    for (const std::int32_t unit : {begin / kUnitRows, (end - 1) / kUnitRows}) {
      for (std::int32_t row = unit * kUnitRows; row < (unit + 1) * kUnitRows; row += kWordRows) {
        const std::uint32_t word = *packed.words_at(first, chunk * kChunkRows + row, key);
        if ((word & bit_range(begin - row, end - row)) != 0) return true;
      }
    }
  }
  return false;
}

}  // namespace flash_dmattn::internal::cuda
