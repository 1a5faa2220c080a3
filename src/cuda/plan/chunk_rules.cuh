// A Visibility as one chunk of query rows sees it: what planning asks for every key, with all that does not depend on
// the key worked out before, for several keys at once.
#pragma once

#include <climits>

#include "cuda/plan/entry_offset.cuh"
#include "cuda/plan/visibility.cuh"

namespace flash_dmattn::internal::cuda {

// What decides which rows of one chunk see a key.
struct ChunkRules {
  std::int32_t first_row, end_row;
  std::int32_t limit;         // keys [0, limit) may be seen
  std::int32_t causal_shift;  // row i sees keys up to i + causal_shift
  bool is_causal;
  const std::int32_t *begin, *end;  // null: no intervals
  const std::uint8_t* key_mask;     // null: none
  const std::uint32_t* packed;      // PackedMask::units of the chunk; null: none
  std::int64_t begin_stride, end_stride, key_mask_stride, packed_stride;
};

__device__ inline ChunkRules chunk_rules(const Visibility& visibility, std::int32_t batch, std::int32_t head,
                                         std::int32_t chunk) {
  ChunkRules rules = {};
  const std::int32_t existing = key_count(visibility, batch);
  rules.first_row = chunk * kChunkRows;
  rules.end_row = rules.first_row + min(kChunkRows, visibility.rows - rules.first_row);
  rules.limit = causal_limit(visibility, existing, rules.end_row - 1);
  rules.causal_shift = existing - visibility.rows;
  rules.is_causal = visibility.is_causal;
  if (visibility.begin.defined()) {
    rules.begin = static_cast<const std::int32_t*>(visibility.begin.data) + entry_offset(visibility.begin, batch, head);
    rules.end = static_cast<const std::int32_t*>(visibility.end.data) + entry_offset(visibility.end, batch, head);
    rules.begin_stride = visibility.begin.key_stride;
    rules.end_stride = visibility.end.key_stride;
  }
  if (visibility.key_mask.defined()) {
    rules.key_mask =
        static_cast<const std::uint8_t*>(visibility.key_mask.data) + entry_offset(visibility.key_mask, batch, head);
    rules.key_mask_stride = visibility.key_mask.key_stride;
  }
  if (visibility.packed.defined()) {
    rules.packed = visibility.packed.units + visibility.packed.offset(batch, head, chunk, 0);
    rules.packed_stride = visibility.packed.key_stride;
  }
  return rules;
}

// units[k]: bit u is set if unit u of the chunk may see keys[k], and bit 16 + u if every row of it does, those past the
// last aside; 0 if no unit may. Exact but for a packed mask beside other rules: a unit may be named then of which the
// mask and the others show different rows. All loads are under way before the first is used. Keys outside [0, limit)
// are seen by no unit.
template <int kCount>
__device__ inline void units_of_keys(const ChunkRules& rules, const std::int32_t (&keys)[kCount],
                                     std::uint32_t (&units)[kCount]) {
  std::int32_t safe[kCount], begin[kCount], end[kCount];
  std::uint32_t shown[kCount], packed[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    safe[k] = max(0, min(keys[k], rules.limit - 1));
    begin[k] = rules.first_row, end[k] = rules.end_row;
    shown[k] = 1, packed[k] = ~0u;
  }
  if (rules.begin != nullptr) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      begin[k] = __ldg(rules.begin + safe[k] * rules.begin_stride);
      end[k] = __ldg(rules.end + safe[k] * rules.end_stride);
    }
  }
  if (rules.key_mask != nullptr) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) shown[k] = __ldg(rules.key_mask + safe[k] * rules.key_mask_stride);
  }
  if (rules.packed != nullptr) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) packed[k] = __ldg(rules.packed + safe[k] * rules.packed_stride);
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    std::int32_t first = max(begin[k], rules.first_row);
    if (rules.is_causal) first = max(first, safe[k] - rules.causal_shift);
    const std::int32_t past = min(max(end[k], rules.first_row), rules.end_row);
    units[k] = 0;
    if (keys[k] == safe[k] && first < past && shown[k] != 0) {
      const std::uint32_t first_unit = static_cast<std::uint32_t>(first - rules.first_row) / kUnitRows;
      const std::uint32_t last_unit = static_cast<std::uint32_t>(past - 1 - rules.first_row) / kUnitRows;
      const std::uint32_t some = ((2u << last_unit) - (1u << first_unit)) & packed[k];
      // Units that begin no sooner than the first row and end no later than the last one, or where the chunk's rows do.
      const std::uint32_t first_full = static_cast<std::uint32_t>(first - rules.first_row + kUnitRows - 1) / kUnitRows;
      const std::uint32_t past_full =
          past == rules.end_row ? kChunkUnits : static_cast<std::uint32_t>(past - rules.first_row) / kUnitRows;
      const std::uint32_t all = bit_range(static_cast<int>(first_full), static_cast<int>(past_full));
      if ((some & kAnyUnit) != 0) units[k] = (some & kAnyUnit) | (all << kChunkUnits & packed[k]);
    }
  }
}

// Which of the keys first_key + 32 * k some unit sees, where contiguous intervals and the causal rule decide alone:
// what most time is spent on when sequences are long. All keys lie in [0, limit).
template <int kCount>
__device__ inline void intervals_show(const ChunkRules& rules, std::int32_t first_key, bool (&visible)[kCount]) {
  std::int32_t begin[kCount], end[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) begin[k] = __ldg(rules.begin + first_key + 32 * k);
#pragma unroll
  for (int k = 0; k < kCount; ++k) end[k] = __ldg(rules.end + first_key + 32 * k);
  const std::int32_t first_row = rules.is_causal ? first_key - rules.causal_shift : INT32_MIN;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    visible[k] = max(max(begin[k], rules.first_row), first_row + 32 * k) < min(end[k], rules.end_row);
  }
}

}  // namespace flash_dmattn::internal::cuda
