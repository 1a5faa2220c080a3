// The keys of a split that some row of the block sees, found by one warp as it goes.
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

// Lists the keys of the window that begins at `first_key` after the `count` that are listed; returns how many there are
// then. Any rules: every row of the block is asked for every key.
__device__ inline int list_by_rules(const DecodeParams& params, const DecodeBlock& block, int first_key,
                                    ListedKey* entries, int count) {
  constexpr int kKeys = 4;  // of a lane at once, so that their reads overlap
  const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll 1
  for (int offset = 0; offset < params.window; offset += 32 * kKeys) {
    std::uint32_t words[kKeys] = {};
    const int first = first_key + offset + lane;
    const int end = min(block.end, first_key + params.window);
    const int asked = params.uniform ? 1 : block.count;
#pragma unroll 1
    for (int m = 0; m < asked; ++m) add_row(params, block, first, end, m, words);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (params.uniform && words[i] != 0) words[i] = kAllRows;
      const std::uint32_t seen = __ballot_sync(~0u, words[i] != 0);
      if (words[i] != 0) {
        entries[count + __popc(seen & ((1u << lane) - 1))] =
            static_cast<std::uint32_t>(first + 32 * i - block.begin) | words[i] << 16;
      }
      count += __popc(seen);
    }
  }
  return count;
}

// Windows of keys go to the warps of a block by turns. Keys come in tiles of kTileKeys, and the mask is read four to
// eight windows ahead: the reads wait behind those of keys and values.
template <int kTileKeys, int kWarps>
class KeyList {
  static_assert(kTileKeys <= 32);

 public:
  static constexpr int kBatch = 4;  // windows of which the mask is read at once
  using MaskBytes = uint2[kBatch];

  // `entries`: kMostWindow + kTileKeys in shared memory.
  __device__ KeyList(const DecodeParams& params, const DecodeBlock& block, ListedKey* entries, MaskBytes& first_bytes)
      : params_(params), block_(block), entries_(entries), lane_(static_cast<int>(threadIdx.x) % 32) {
    next_ = block.begin + static_cast<int>(threadIdx.x) / 32 * params.window;
    if (!params.by_bytes) return;
    // Lanes read whole aligned pieces of the mask: the first window begins before the split, if need be.
    if (params.mask.defined()) {
      next_ -= static_cast<int>((reinterpret_cast<std::uintptr_t>(block.mask) + block.begin) % kLaneKeys);
    }
    load_bytes(first_bytes, 0);
    load_bytes(later_bytes_, kBatch);
  }

  // Before the first tile. `first_bytes` as the constructor left them: other work fits in between.
  __device__ void start(const MaskBytes& first_bytes) {
    if (params_.by_bytes) take_bytes(first_bytes);
  }

  // The next tile: lane l has its key l, or 0. All are 0 when there is none.
  __device__ ListedKey next_tile() {
    while (left_ < kTileKeys && next_ < block_.end) look_through_window();
    const int taken = min(left_, kTileKeys);
    left_ -= taken;
    return lane_ < taken ? entries_[left_ + lane_] : 0;
  }

  // How far a key is from block.begin; -1 for no key.
  __device__ std::int32_t distance_of(ListedKey key) const {
    return key != 0 ? static_cast<std::int32_t>(key & 0xffff) : -1;
  }

 private:
  __device__ void look_through_window() {
    __syncwarp();  // entries that were handed out are read
    if (params_.by_bytes) {
      list_by_bytes();
    } else {
      left_ = list_by_rules(params_, block_, next_, entries_, left_);
      next_ += kWarps * params_.window;
    }
    __syncwarp();
  }

  // The bytes of the lane's keys in the window that begins at `window`; those of keys outside the split may be
  // anything.
  __device__ uint2 load_bytes(int window) const {
    const int first = window + lane_ * kLaneKeys;
    if (lane_ * kLaneKeys >= params_.window || first >= block_.end || first + kLaneKeys <= block_.begin) return {0, 0};
    if (!params_.mask.defined()) return {~0u, ~0u};
    const std::uint8_t* bytes = block_.mask + first;
    if (first >= 0 && first + kLaneKeys <= params_.keys) return __ldg(reinterpret_cast<const uint2*>(bytes));
    std::uint64_t words = 0;
#pragma unroll 1
    for (int i = max(block_.begin - first, 0); i < min(block_.end - first, kLaneKeys); ++i) {
      words |= std::uint64_t{bytes[i]} << (8 * i);
    }
    return {static_cast<std::uint32_t>(words), static_cast<std::uint32_t>(words >> 32)};
  }
  // Those of the windows `ahead`, ahead + 1, ... after the next.
  __device__ void load_bytes(MaskBytes& bytes, int ahead) const {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) bytes[i] = load_bytes(next_ + (ahead + i) * kWarps * params_.window);
  }

  // What the bytes of the windows from next_ on say.
  __device__ void take_bytes(const MaskBytes& bytes) {
    static_assert(kBatch * kLaneKeys == 32);
    seen_ = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int first = next_ + i * kWarps * params_.window + lane_ * kLaneKeys;
      const std::uint32_t seen = nonzero_bytes(bytes[i].x) | nonzero_bytes(bytes[i].y) << 4;
      seen_ |= (seen & bit_range(block_.begin - first, block_.end - first)) << (kLaneKeys * i);
    }
    windows_ = kBatch;
  }

  // One window, or all that are known if the list has room for their keys.
  __device__ void list_by_bytes() {
    if (windows_ == 0) {
      take_bytes(later_bytes_);
      load_bytes(later_bytes_, kBatch);
    }
    const bool all = __reduce_add_sync(~0u, static_cast<unsigned>(__popc(seen_))) <= kMostWindow;
    std::uint32_t seen = all ? seen_ : seen_ & ((1u << kLaneKeys) - 1);
    const int first = next_ - block_.begin + lane_ * kLaneKeys, stride = kWarps * params_.window;
    const int windows = all ? windows_ : 1;
    seen_ = all ? 0 : seen_ >> kLaneKeys;
    windows_ -= windows;
    next_ += windows * stride;
    if (__all_sync(~0u, seen == 0)) return;
    // Where the lane's keys begin: behind the keys of the lanes before.
    const int count = __popc(seen);
    int until = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, until, step);
      if (lane_ >= step) until += before;
    }
    ListedKey* target = entries_ + left_ + until - count;
    while (seen != 0) {
      const int bit = __ffs(static_cast<int>(seen)) - 1;
      *target++ = static_cast<std::uint32_t>(first + bit / kLaneKeys * stride + bit % kLaneKeys) | kAllRows << 16;
      seen &= seen - 1;
    }
    left_ += __shfl_sync(~0u, until, 31);
  }

  const DecodeParams& params_;
  const DecodeBlock& block_;
  ListedKey* entries_;
  int lane_;
  int next_;                // first key of the warp's next window
  int left_ = 0;            // entries that are still to hand out, from the last to the first
  std::uint32_t seen_ = 0;  // bits of the lane's keys in this many windows, the next one lowest
  int windows_ = 0;
  MaskBytes later_bytes_ = {};  // of the windows after those
};

}  // namespace flash_dmattn::internal::cuda
