// The keys of a split that some row of the block sees, found by its warps together as they go.
#pragma once

#include <cstdint>

#include "cuda/decode/config.h"
#include "cuda/decode/decode_block.cuh"
#include "cuda/plan/entry_offset.cuh"
#include "cuda/plan/visibility.cuh"

namespace flash_dmattn::internal::cuda {

// A listed key: its distance from the first of the split (in key_union.cuh, of stripes) and, in the upper half, bit m
// for each row that sees it. 0 is no key.
using ListedKey = std::uint32_t;
constexpr std::uint32_t kAllRows = 0xffff;

// Bit i: byte i is not 0.
__device__ inline std::uint32_t nonzero_bytes(std::uint32_t word) {
  const std::uint32_t ones = ((((word & 0x7f7f7f7fu) + 0x7f7f7f7fu) | word) >> 7) & 0x01010101u;
  return (ones * 0x01020408u) >> 24;
}

// Sets bit m of the words of keys first, first + 32, ... below `end` that row m of the block sees.
template <int kKeys>
__device__ inline void add_row(const DecodeParams& params, const DecodeBlock& block, int first, int end, int m,
                               std::uint32_t (&words)[kKeys]) {
  const std::int32_t row = block.row(m), head = block.head(m);
  const int limit = min(end, causal_limit(params.visibility, block.existing, row));
  bool seen[kKeys];
  std::int32_t key[kKeys];  // what is read in place of a key past the limit is not used
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    seen[i] = first + 32 * i >= block.begin && first + 32 * i < limit;
    key[i] = seen[i] ? first + 32 * i : block.begin;
  }
  if (params.mask.defined()) {
    const BroadcastView& mask = params.mask;
    const auto* bytes =
        static_cast<const std::uint8_t*>(mask.data) + entry_offset(mask, block.batch, head) + row * mask.row_stride;
    std::uint8_t byte[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) byte[i] = bytes[key[i] * mask.key_stride];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) seen[i] = seen[i] && byte[i] != 0;
  }
  if (params.visibility.begin.defined()) {
    const BroadcastView &first_row = params.visibility.begin, &end_row = params.visibility.end;
    const auto* begins = static_cast<const std::int32_t*>(first_row.data) + entry_offset(first_row, block.batch, head);
    const auto* ends = static_cast<const std::int32_t*>(end_row.data) + entry_offset(end_row, block.batch, head);
    std::int32_t from[kKeys], to[kKeys];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      from[i] = begins[key[i] * first_row.key_stride];
      to[i] = ends[key[i] * end_row.key_stride];
    }
#pragma unroll
    for (int i = 0; i < kKeys; ++i) seen[i] = seen[i] && from[i] <= row && row < to[i];
  }
#pragma unroll
  for (int i = 0; i < kKeys; ++i) words[i] |= std::uint32_t{seen[i]} << m;
}

// Warps look for keys in windows, which they take by turns, and the keys that they find are numbered together, in an
// order that depends on nothing but the keys. Tiles of kTileKeys neighbours in that order go to warps by turns, so that
// none has more than one tile more to attend than another: chance gives some warps' windows a third more keys than
// others'. A mask is read four to eight windows ahead: the reads wait behind those of keys and values.
template <typename Config>
class KeyList {
  static constexpr int kWarps = Config::kWarps, kTileKeys = Config::kTileKeys;
  static constexpr int kRowKeys = kWarps * kTileKeys;  // of one tile for each warp
  static_assert(kTileKeys <= 32);

 public:
  static constexpr int kBatch = 4;  // windows of which the mask is read at once
  using MaskBytes = uint2[kBatch];
  // Found keys until they are handed out: those of a window for each warp, and an incomplete row of tiles.
  static constexpr int kMostFound = kWarps * kMostWindow, kEntries = kWarps * Config::kListKeys;
  static_assert(kEntries >= kMostFound + kRowKeys - 1 && kEntries % kRowKeys == 0);
  struct State {
    std::uint32_t found[kWarps];
  };

  // `entries`: kEntries in shared memory.
  __device__ KeyList(const DecodeParams& params, const DecodeBlock& block, State& state, ListedKey* entries,
                     MaskBytes& first_bytes)
      : params_(params),
        block_(block),
        state_(state),
        entries_(entries),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) % 32),
        next_(block.begin) {
    if (has_all_keys()) {
      next_ = block.end;
      found_ = block.end - block.begin;
    } else if (params.by_bytes) {
      // Lanes read whole aligned pieces of the mask: the first window begins before the split, if need be.
      next_ -= static_cast<int>((reinterpret_cast<std::uintptr_t>(block.mask) + block.begin) % kLaneKeys);
      load_bytes(first_bytes, 0);
      load_bytes(later_bytes_, kBatch);
    }
  }

  // Before the first tile. `first_bytes` as the constructor left them: other work fits in between.
  __device__ void start(const MaskBytes& first_bytes) {
    if (params_.by_bytes && !has_all_keys()) take_bytes(first_bytes);
  }

  // The warp's next tile: lane l has its key l, or 0. All are 0 when there is none. To be called by all warps the same
  // number of times until they have got none: some calls wait for the other warps.
  __device__ ListedKey next_tile() {
    while (found_ < handed_out_ + kRowKeys && next_ < block_.end) {
      if (params_.by_bytes) {
        find_by_bytes();
      } else {
        find_by_rules();
      }
    }
    const int in_row = warp_ * kTileKeys + lane_, number = handed_out_ + in_row;
    handed_out_ += kRowKeys;
    const int place = row_place_ + in_row;
    row_place_ = row_place_ + kRowKeys == kEntries ? 0 : row_place_ + kRowKeys;
    if (lane_ >= kTileKeys || number >= found_) return 0;
    return has_all_keys() ? static_cast<ListedKey>(number) | kAllRows << 16 : entries_[place];
  }

  // How far a key is from block.begin; -1 for no key.
  __device__ std::int32_t distance_of(ListedKey key) const {
    return key != 0 ? static_cast<std::int32_t>(key & 0xffff) : -1;
  }

 private:
  // Nothing hides any: they are not listed.
  __device__ bool has_all_keys() const { return params_.by_bytes && !params_.mask.defined(); }
  __device__ int windows_stride() const { return kWarps * params_.window; }
  // The lane's first key of the window `ahead` after the warp's next.
  __device__ int first_of_lane(int ahead) const {
    return next_ + warp_ * params_.window + ahead * windows_stride() + lane_ * kLaneKeys;
  }

  // The bytes of the lane's keys in the windows `ahead`, ahead + 1, ... after the next; those of keys outside the split
  // may be anything.
  __device__ void load_bytes(MaskBytes& bytes, int ahead) const {
    const int stride = windows_stride(), begin = next_ + ahead * stride, first = first_of_lane(ahead);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) bytes[i] = make_uint2(0, 0);
    // Nearly always there is no such window, or all of them lie in the split, and so in the mask: then nothing is asked
    // about each of them. Blocks of few keys have little else to do.
    if (begin >= block_.end) return;
    if (begin >= block_.begin && begin + kBatch * stride <= block_.end) {
      if (lane_ * kLaneKeys >= params_.window) return;
      const std::uint8_t* source = block_.mask + first;
#pragma unroll
      for (int i = 0; i < kBatch; ++i, source += stride) bytes[i] = __ldg(reinterpret_cast<const uint2*>(source));
      return;
    }
    const auto is_wanted = [&](int key) {
      return lane_ * kLaneKeys < params_.window && key < block_.end && key + kLaneKeys > block_.begin;
    };
    const auto is_inside = [&](int key) { return key >= 0 && key + kLaneKeys <= params_.keys; };
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int key = first + i * stride;
      if (is_wanted(key) && is_inside(key)) bytes[i] = __ldg(reinterpret_cast<const uint2*>(block_.mask + key));
    }
    // Pieces that reach beyond the mask. Asked for all together, as hardly any batch has one.
    const int end_of_pieces = block_.end + (kLaneKeys - 1) - (block_.end - next_ + kLaneKeys - 1) % kLaneKeys;
    if (begin >= 0 && min(begin + kBatch * stride, end_of_pieces) <= params_.keys) return;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int key = first + i * stride;
      if (!is_wanted(key) || is_inside(key)) continue;
      std::uint64_t words = 0;
#pragma unroll 1
      for (int j = max(block_.begin - key, 0); j < min(block_.end - key, kLaneKeys); ++j) {
        words |= std::uint64_t{block_.mask[key + j]} << (8 * j);
      }
      bytes[i] = make_uint2(static_cast<std::uint32_t>(words), static_cast<std::uint32_t>(words >> 32));
    }
  }

  // What the bytes of the windows from next_ on say.
  __device__ void take_bytes(const MaskBytes& bytes) {
    static_assert(kBatch * kLaneKeys == 32);
    seen_ = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      seen_ |= (nonzero_bytes(bytes[i].x) | nonzero_bytes(bytes[i].y) << 4) << (kLaneKeys * i);
    }
    windows_ = kBatch;
    // Whether there is a piece with keys before the split, or after it.
    if (next_ >= block_.begin && (block_.end - next_) % kLaneKeys == 0) return;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int first = first_of_lane(i);
      const std::uint32_t missing = ~bit_range(block_.begin - first, block_.end - first) & ((1u << kLaneKeys) - 1);
      seen_ &= ~(missing << (kLaneKeys * i));
    }
  }

  // Says how many keys the warp has found, and returns how many those before it have, and all. A barrier: what has been
  // handed out is read.
  __device__ uint2 exchange_found(std::uint32_t count) {
    if (lane_ == 0) state_.found[warp_] = count;
    __syncthreads();
    uint2 before_and_all = make_uint2(0, 0);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const std::uint32_t of_warp = state_.found[w];
      if (w < warp_) before_and_all.x += of_warp;
      before_and_all.y += of_warp;
    }
    return before_and_all;
  }
  // Lists a key as the one of this number among those of this time.
  __device__ void put(int number, ListedKey key) const {
    const int place = found_place_ + number;
    entries_[place >= kEntries ? place - kEntries : place] = key;
  }
  // Once all warps have put theirs, this many together.
  __device__ void end_finding(int count) {
    found_ += count;
    found_place_ += count;
    if (found_place_ >= kEntries) found_place_ -= kEntries;
    __syncthreads();
  }

  // In all windows that are known or, if there is no room for so many, in one for each warp.
  __device__ void find_by_bytes() {
    if (windows_ == 0) {
      take_bytes(later_bytes_);
      load_bytes(later_bytes_, kBatch);
    }
    // How many are in the known windows and, in the upper half, how many in the first.
    constexpr std::uint32_t kOneWindow = (1u << kLaneKeys) - 1;
    const auto own = static_cast<std::uint32_t>(__popc(seen_) | __popc(seen_ & kOneWindow) << 16);
    std::uint32_t until = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const std::uint32_t before = __shfl_up_sync(~0u, until, step);
      if (lane_ >= step) until += before;
    }
    const uint2 before_and_all = exchange_found(__shfl_sync(~0u, until, 31));
    const bool all = (before_and_all.y & 0xffff) <= kMostFound;
    const auto chosen = [&](std::uint32_t counts) { return static_cast<int>(all ? counts & 0xffff : counts >> 16); };
    int number = chosen(before_and_all.x + until - own);
    std::uint32_t seen = all ? seen_ : seen_ & kOneWindow;
    const int stride = windows_stride(), windows = all ? windows_ : 1;
    const auto first = static_cast<std::uint32_t>(first_of_lane(0) - block_.begin);
#pragma unroll 1
    for (; seen != 0; seen &= seen - 1) {
      const auto bit = static_cast<std::uint32_t>(__ffs(static_cast<int>(seen)) - 1);
      put(number++, (first + bit / kLaneKeys * static_cast<std::uint32_t>(stride) + bit % kLaneKeys) | kAllRows << 16);
    }
    seen_ = all ? 0 : seen_ >> kLaneKeys;
    windows_ -= windows;
    next_ += windows * stride;
    end_finding(chosen(before_and_all.y));
  }

  // Any rules, in one window for each warp: every row of the block is asked for every key.
  __device__ void find_by_rules() {
    constexpr int kKeys = kMostRuleWindow / 32;  // of a lane at once, so that their reads overlap
    std::uint32_t words[kKeys] = {};
    const int window = next_ + warp_ * params_.window, first = window + lane_;
    const int end = min(block_.end, window + params_.window);
    const int asked = params_.uniform ? 1 : block_.count;
#pragma unroll 1
    for (int m = 0; m < asked; ++m) add_row(params_, block_, first, end, m, words);
    std::uint32_t seen[kKeys];
    int count = 0;
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      seen[i] = __ballot_sync(~0u, words[i] != 0);
      count += __popc(seen[i]);
    }
    const uint2 before_and_all = exchange_found(static_cast<std::uint32_t>(count));
    int number = static_cast<int>(before_and_all.x);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (words[i] != 0) {
        put(number + __popc(seen[i] & ((1u << lane_) - 1)),
            static_cast<std::uint32_t>(first + 32 * i - block_.begin) | (params_.uniform ? kAllRows : words[i]) << 16);
      }
      number += __popc(seen[i]);
    }
    next_ += windows_stride();
    end_finding(static_cast<int>(before_and_all.y));
  }

  const DecodeParams& params_;
  const DecodeBlock& block_;
  State& state_;
  ListedKey* entries_;
  int warp_, lane_;
  int next_;                            // first key of the block's next windows
  int found_ = 0, found_place_ = 0;     // keys so far, and where the next one is put: modulo kEntries
  int handed_out_ = 0, row_place_ = 0;  // of these, complete rows of tiles; where the next row is
  std::uint32_t seen_ = 0;              // bits of the lane's keys in this many windows, the next one lowest
  int windows_ = 0;
  MaskBytes later_bytes_ = {};  // of the windows after those
};

}  // namespace flash_dmattn::internal::cuda
