// What hides keys, in the form that device code reads: the causal rule, lengths, intervals, per-key masks and, for
// masks that differ by row and key, packed bits. Visibility is asked for in words of 32 rows of one key.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace flash_dmattn::internal::cuda {

constexpr int kWordRows = 32;     // rows of a visibility word
constexpr int kUnitRows = 64;     // rows of a unit, the finest that a plan tells apart
constexpr int kChunkRows = 1024;  // rows with one list of keys
constexpr int kChunkUnits = kChunkRows / kUnitRows;
constexpr int kChunkWords = kChunkRows / kWordRows;
constexpr int kBandRows = 128;  // rows whose words of a key lie side by side in a packed mask
constexpr int kBandWords = kBandRows / kWordRows;
constexpr int kChunkBands = kChunkRows / kBandRows;
// Of 32 bits that say which units see some of a key (or tile) and, above these, which see all of it.
constexpr std::uint32_t kAnyUnit = (1u << kChunkUnits) - 1;

// A mask that differs by row, packed by pack_mask: bit r of words[...][band][key][word] is row 32 * word + r of the
// band. Rows past the last are 0. Words of neighbouring keys are neighbours, since warps read those of 32 keys at once.
struct PackedMask {
  // (mask batches, mask heads, chunks, kChunkBands, mask keys: Sk or 1, kBandWords)
  const std::uint32_t* words = nullptr;
  // (mask batches, mask heads, chunks, mask keys): bit u is set if unit u has a visible row, bit 16 + u if it has no
  // hidden one. Rows past the last count neither way.
  const std::uint32_t* units = nullptr;
  std::int64_t batch_stride = 0, head_stride = 0;  // in keys; 0 where broadcast
  std::int32_t chunk_stride = 0;                   // likewise
  std::int32_t key_stride = 0;                     // 1, or 0 if a row's bit is the same for all keys
  std::int64_t head_divisor = 1;

  constexpr bool defined() const { return words != nullptr; }
  constexpr std::int64_t offset(std::int64_t b, std::int64_t h, std::int64_t chunk, std::int64_t key) const {
    return b * batch_stride + (h / head_divisor) * head_stride + chunk * chunk_stride + key * key_stride;
  }
  // Where in `words` the word of `row` lies, before those after it in its band; `first`: offset() of the batch
  // element's and head's first entry.
  constexpr std::int64_t word_offset(std::int64_t first, std::int32_t row, std::int32_t key) const {
    const std::int64_t entry = first * kChunkBands + std::int64_t{row / kBandRows} * chunk_stride + key * key_stride;
    return entry * kBandWords + row % kBandRows / kWordRows;
  }
  constexpr const std::uint32_t* words_at(std::int64_t first, std::int32_t row, std::int32_t key) const {
    return words + word_offset(first, row, key);
  }
  // The same rows' words of `key`; `of_first`: those of key 0.
  constexpr const std::uint32_t* words_of_key(const std::uint32_t* of_first, std::int32_t key) const {
    return of_first + std::int64_t{key} * key_stride * kBandWords;
  }
  // Words from a band to the next one.
  constexpr std::int64_t band_stride() const { return std::int64_t{chunk_stride} * kBandWords; }
};

// A call's VisibilityViews as kernels read them: what they decide about a score by, without the plan.
struct Visibility {
  std::int32_t rows = 0, keys = 0;
  bool is_causal = false;
  const std::int32_t* seqlens = nullptr;
  std::int64_t seqlens_stride = 0;
  BroadcastView begin, end;  // int32 intervals per key; data null: none
  BroadcastView key_mask;    // bool, the same for every row; data null: none
  PackedMask packed;
};

}  // namespace flash_dmattn::internal::cuda
