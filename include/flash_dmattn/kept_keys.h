// Dynamic selection while a cache grows: the w best of all keys so far, updated in place as keys arrive, without
// looking at the others again. A key that drops out of the best w of a growing cache never comes back
// (docs/selection.md), so that what was kept and the new keys tell what is kept now. Where keys leave a cache by age,
// as from a sliding window, this does not hold.
#pragma once

#include <cstdint>

#include "flash_dmattn/export.h"
#include "flash_dmattn/selection.h"
#include "flash_dmattn/status.h"
#include "flash_dmattn/tensor.h"

namespace FLASH_DMATTN_API flash_dmattn {

// The best keys of each (batch, head), in any order, no key twice. Written to by append_kept_keys. Contiguous.
struct KeptKeys {
  TensorView indices;  // int32 (B, heads, w); a negative index: the place is empty, whatever its score is
  TensorView scores;   // (B, heads, w), float16, bfloat16, float32 or float64: those of the keys
  // int32 (B, heads), or none: how many keys the cache had when these were the best. Another number than a cache can
  // have, -1 for example: these are not the best of any.
  TensorView lengths = {};
};

// The keys that a step adds to a cache, and where they stand.
struct NewKeys {
  // (B, heads, S), at most kMaxNewKeys, any strides, of the dtype of the kept scores.
  TensorView scores;
  // int32 (B): the index of the first new key of each batch element, above those of all keys before; the others follow.
  // A new key with a negative index, or one above 2^31 - 1, is never kept.
  TensorView positions;
  // (B, heads, Sk), any strides, of the dtype of the kept scores, or none: of all keys of the cache by index, new ones
  // included or not; -inf where a key is hidden. Needs the kept keys' lengths.
  TensorView cache_scores = {};
};

// New keys of a call at most.
constexpr std::int64_t kMaxNewKeys = 16;

// Afterwards `kept` holds what select_keys, with `causal` or without, keeps of all keys so far for the last row: the w
// of highest score; among equal scores the newest stay, -0 equals 0, NaNs are equal and rank highest, -inf and the
// dtype's lowest finite value are never kept. A new key takes the first empty place, or the place of the key that it
// puts out. O(w) time per new key. Lengths, where they are given, become those of the cache with the new keys.
//
// With cache_scores it heals itself: where a length is not the position of the first new key (keys were taken off the
// cache's end, or came without this call), the best of the keys before that position are found anew, in O(Sk) time, and
// stand by index in the first places. This is decided on the device.
//
// `lists`: int32 (B, heads, S, w), contiguous, or none: row i gets the indices of what is kept once the new keys 0 to i
// are there, with negative ones for empty places. These are the lists of KeyIndices for S query rows at these keys.
Status append_kept_keys(const NewKeys&, const KeptKeys& kept, const TensorView& lists = {},
                        const SelectionContext& = {});

}  // namespace FLASH_DMATTN_API flash_dmattn
