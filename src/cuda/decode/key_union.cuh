// The keys that rows of a block list (KeyIndices) and see, found by all threads of the block together.
//
// Keys are striped across splits (stripes.h), so that a block passes over entries of other splits' keys after one
// test. For each of its own keys it sets a bit in shared memory, by the key's stripe: there repeats, and keys that
// several rows list, count once, and clearing, counting and listing go over one bit for every `splits` keys. Of the
// cache nothing is looked at but what is listed. What comes out depends on nothing but which keys are listed and the
// number of splits, which follows from shapes: repeated runs give identical bits.
//
// Rounds: bits take the memory of the tiles. A listed key is 16 bits, so that more than 2^16 stripes are gone through
// in ranges. A round finds at most kRoundKeys; if a range has more, its bits are made again when those have been
// attended. So any keys may be listed, also when they are all of one split.
#pragma once

#include <cstdint>

#include "cuda/decode/config.h"
#include "cuda/decode/key_list.cuh"
#include "cuda/plan/row_list.cuh"
#include "cuda/plan/visibility.cuh"

namespace flash_dmattn::internal::cuda {

// Keys that have been found. As KeyList it hands out tiles, to warps by turns.
template <int kTileKeys, int kWarps>
class FoundKeys {
 public:
  // Entries are stripes, counted from `first_stripe`.
  __device__ FoundKeys(const DecodeParams& params, const DecodeBlock& block, std::int32_t first_stripe,
                       const ListedKey* entries, int count)
      : params_(params),
        block_(block),
        first_stripe_(first_stripe),
        entries_(entries + static_cast<int>(threadIdx.x) / 32 * kTileKeys),
        left_(count - static_cast<int>(threadIdx.x) / 32 * kTileKeys) {}

  // The next tile: lane l has its key l, or 0. All are 0 when there is none.
  __device__ ListedKey next_tile() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const ListedKey key = lane < min(left_, kTileKeys) ? entries_[lane] : 0;
    entries_ += kWarps * kTileKeys;
    left_ -= kWarps * kTileKeys;
    return key;
  }

  // How far a key is from block.begin; -1 for no key.
  __device__ std::int32_t distance_of(ListedKey key) const {
    if (key == 0) return -1;
    return static_cast<std::int32_t>(params_.stripes.key_of(block_.split, first_stripe_ + (key & 0xffff)));
  }

 private:
  const DecodeParams& params_;
  const DecodeBlock& block_;
  std::int32_t first_stripe_;
  const ListedKey* entries_;  // those of the warp's next tile
  int left_;                  // from these on
};

template <typename Config>
class KeyUnion {
  static constexpr int kThreads = Config::kThreads, kWarps = Config::kWarps;

 public:
  using List = FoundKeys<Config::kTileKeys, kWarps>;
  static constexpr int kRoundKeys = kWarps * Config::kListKeys;
  static constexpr int kRangeStripes = 1 << 16, kRangeWords = kRangeStripes / 32;
  static_assert(2 * kRangeWords * sizeof(std::uint32_t) <= Config::kTilesBytes);

  struct State {
    std::uint32_t list_rows[kDecodeRows];  // of rows that share a list, the first has bits for all, the others 0
    std::int32_t warp_counts[kWarps];
  };

  // `memory`: that of the tiles. `entries`: kRoundKeys. The block begins with key 0.
  __device__ KeyUnion(const DecodeParams& params, const DecodeBlock& block, State& state, unsigned char* memory,
                      ListedKey* entries)
      : params_(params),
        block_(block),
        state_(state),
        bits_(reinterpret_cast<std::uint32_t*>(memory)),
        numbers_(reinterpret_cast<std::int32_t*>(memory) + kRangeWords),
        entries_(entries),
        thread_(static_cast<int>(threadIdx.x)) {
    if (thread_ >= kDecodeRows) return;
    std::uint32_t rows = thread_ == 0 ? 1 : 0;  // uniform: its first row speaks for all
    for (int m = 0; m < block.count && thread_ < block.count && !params.uniform; ++m) {
      const bool same = (!params.list_by_row || block.row(m) == block.row(thread_)) &&
                        (!params.list_by_head || block.head(m) == block.head(thread_));
      rows |= std::uint32_t{same} << m;
    }
    state.list_rows[thread_] = (rows & ((1u << thread_) - 1)) == 0 ? rows : 0;
  }

  // Finds the keys of the next round. False: there are no more. `meanwhile`: what threads do before the first, while
  // they wait for entries.
  template <typename Meanwhile>
  __device__ bool find_next(Meanwhile meanwhile) {
    const std::int32_t end = stripes_below(limit_of(block_.count - 1));
    for (;;) {
      if (first_ == kNone) range_ += stripes_, first_ = 0;
      if (range_ >= end) return false;
      stripes_ = min(end - range_, kRangeStripes);
      __syncthreads();  // tiles and entries are no longer read
      set_bits([&] {
        if (range_ == 0 && first_ == 0) meanwhile();
      });
      const std::int32_t left = list_keys();
      if (found_ > 0 && !params_.uniform) add_rows();
      first_ = left > 0 ? first_ + found_ : kNone;
      if (found_ > 0) return true;
    }
  }

  __device__ List found() const { return List(params_, block_, range_, entries_, found_); }

 private:
  static constexpr std::int32_t kNone = -1;

  __device__ std::int32_t limit_of(int m) const {
    return causal_limit(params_.visibility, block_.existing, block_.row(m));
  }
  __device__ std::int32_t stripes_below(std::int32_t key) const {
    return static_cast<std::int32_t>(params_.stripes.count_below(block_.split, static_cast<std::uint32_t>(key)));
  }
  __device__ std::int32_t stripe_of(std::int32_t key) const {
    return static_cast<std::int32_t>(params_.stripes.stripe_of(static_cast<std::uint32_t>(key)));
  }
  __device__ std::int32_t key_of(std::int32_t stripe) const {
    return static_cast<std::int32_t>(params_.stripes.key_of(block_.split, static_cast<std::uint32_t>(stripe)));
  }
  __device__ bool owns(std::int32_t key) const { return key >= 0 && key_of(stripe_of(key)) == key; }

  // Entries of a thread that are read at the same time, beside the accumulators of earlier rounds.
  static constexpr int kBatch = Config::kHeadDim <= 128 ? 16 : 8, kVisitBatch = 8;

  // Entries first, first + step, ... of a list (of fewer than 2^31, as decode_applies sees to); -1 past its end.
  template <int kCount>
  static __device__ void read_entries(const RowList& list, std::int32_t first, int step,
                                      std::int32_t (&entries)[kCount]) {
    const std::int32_t* source = list.entries + first * list.stride;
    const std::int64_t stride = step * list.stride;
    const std::int32_t left = static_cast<std::int32_t>(list.count) - first;
    // From one to the next: a product for each takes twice as many instructions.
#pragma unroll
    for (int j = 0; j < kCount; ++j, source = recomputed(source + stride))
      entries[j] = j * step < left ? __ldg(source) : -1;
  }
  __device__ RowList list_of(int m) const {
    return list_of_row(params_.indices, block_.batch, block_.head(m), block_.row(m));
  }

  // visit(word, bits) for the split's keys in the range, less than `limit`, that the list of row m names.
  template <typename Visit>
  __device__ void visit_list(int m, std::int32_t limit, Visit visit) const {
    const RowList list = list_of(m);
    const std::int64_t block_size = params_.indices.block_size;
    const int step = kThreads / params_.entry_threads, part = thread_ % params_.entry_threads;
#pragma unroll 1
    for (std::int32_t i = thread_ / params_.entry_threads; i < list.count; i += kVisitBatch * step) {
      std::int32_t entries[kVisitBatch];
      read_entries(list, i, step, entries);
      // The code for an entry is long. So it is there once, in a loop, which has to read its entries again.
      std::uint32_t left = 0;  // those that may name keys of the split
#pragma unroll
      for (int j = 0; j < kVisitBatch; ++j)
        left |= std::uint32_t{block_size == 1 ? owns(entries[j]) : entries[j] >= 0} << j;
#pragma unroll 1
      for (; left != 0; left &= left - 1) {
        const std::int64_t first = __ldg(list.entries + (i + (__ffs(left) - 1) * step) * list.stride) * block_size;
        if (first >= limit) continue;
        const auto key_end = static_cast<std::int32_t>(min(first + block_size, std::int64_t{limit}));
        const std::int32_t begin = max(stripes_below(static_cast<std::int32_t>(first)) - range_, 0);
        const std::int32_t end = min(stripes_below(key_end) - range_, stripes_);
#pragma unroll 1
        for (int word = begin / 32 + part; word * 32 < end; word += params_.entry_threads) {
          const std::uint32_t bits = bit_range(begin - word * 32, end - word * 32);
          if (bits != 0) visit(word, bits);
        }
      }
    }
  }

  // Sets the bits of a list's single keys less than `limit`: what visit_list comes to where no other rule hides keys.
  // `meanwhile`: what is done while the first entries are on their way.
  template <typename Meanwhile>
  __device__ void set_single_keys(const RowList& list, std::int32_t limit, Meanwhile meanwhile) {
    std::int32_t i = thread_, keys[kBatch];
    read_entries(list, i, kThreads, keys);
    meanwhile();
    const std::int32_t split = block_.split;
    const auto range = static_cast<std::uint32_t>(range_), stripes = static_cast<std::uint32_t>(stripes_);
#pragma unroll 1
    for (;;) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const auto key = static_cast<std::uint32_t>(keys[j]);
        const std::uint32_t stripe = params_.stripes.stripe_of(key), bit = stripe - range;
        const bool own = (key < static_cast<std::uint32_t>(limit)) & (bit < stripes) &
                         (params_.stripes.key_of(split, stripe) == key);
        if (own) atomicOr(bits_ + bit / 32, 1u << bit % 32);
      }
      i += kBatch * kThreads;
      if (i >= list.count) return;
      read_entries(list, i, kThreads, keys);
    }
  }

  __device__ bool has_rules() const { return params_.mask.defined() || params_.visibility.begin.defined(); }

  // Those of `rows` that see a key that they list.
  __device__ std::uint32_t rows_that_see(std::uint32_t rows, std::int32_t key) const {
    // What the first row sees by the causal rule, all do.
    if (!has_rules() && key < limit_of(__ffs(rows) - 1)) return rows;
    std::uint32_t words[1] = {};
    for (; rows != 0; rows &= rows - 1) add_row(params_, block_, key, block_.existing, __ffs(rows) - 1, words);
    return words[0];
  }

  // Sets the bits of keys that some row lists and sees, and leaves a barrier behind.
  template <typename Meanwhile>
  __device__ void set_bits(Meanwhile meanwhile) {
    const auto begin = [&] {
      for (int word = thread_; word * 32 < stripes_; word += kThreads) bits_[word] = 0;
      meanwhile();
      __syncthreads();
    };
    const bool has_single_keys = params_.indices.block_size == 1 && !has_rules();
    if (params_.uniform && has_single_keys) {
      set_single_keys(list_of(0), limit_of(block_.count - 1), begin);
      __syncthreads();
      return;
    }
    begin();
#pragma unroll 1
    for (int m = 0; m < block_.count; ++m) {
      const std::uint32_t rows = state_.list_rows[m];
      if (rows == 0) continue;
      const std::int32_t limit = limit_of(31 - __clz(rows));  // the last of the rows sees most
      if (has_single_keys) {
        set_single_keys(list_of(m), limit, [] {});
        continue;
      }
      visit_list(m, limit, [&](int word, std::uint32_t bits) {
        std::uint32_t seen = bits;
        if (has_rules()) {
          for (std::uint32_t left = bits; left != 0; left &= left - 1) {
            const int bit = __ffs(left) - 1;
            if (rows_that_see(rows, key_of(range_ + word * 32 + bit)) == 0) seen &= ~(1u << bit);
          }
        }
        if (seen != 0) atomicOr(bits_ + word, seen);
      });
    }
    __syncthreads();
  }

  // Lists the range's keys from number first_ on, found_ of them, and leaves a barrier behind. Keys are numbered by
  // thread, then by word, then by bit: where many neighbours are listed, they are many threads' work. Returns how many
  // are left for another round.
  __device__ std::int32_t list_keys() {
    const int lane = thread_ % 32;
    std::int32_t count = 0;
#pragma unroll 4
    for (int word = thread_; word * 32 < stripes_; word += kThreads) count += __popc(bits_[word]);
    std::int32_t until = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t before = __shfl_up_sync(~0u, until, step);
      if (lane >= step) until += before;
    }
    if (lane == 31) state_.warp_counts[thread_ / 32] = until;
    __syncthreads();
    std::int32_t number = until - count - first_, total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const std::int32_t of_warp = state_.warp_counts[w];
      total += of_warp;
      if (w < thread_ / 32) number += of_warp;
    }
    found_ = min(total - first_, kRoundKeys);
    // Rows that the block does not have may see all.
    const std::uint32_t rows = params_.uniform ? kAllRows : kAllRows & ~0u << block_.count;
#pragma unroll 1
    for (int word = thread_; word * 32 < stripes_; word += kThreads) {
      std::uint32_t bits = bits_[word];
      const std::int32_t next = number + __popc(bits);
      if (!params_.uniform) numbers_[word] = number;
      if (next <= 0 || number >= found_) bits = 0;  // of other rounds
#pragma unroll 1
      for (; bits != 0; bits &= bits - 1, ++number) {
        if (number < 0 || number >= found_) continue;
        entries_[number] = static_cast<std::uint32_t>(word * 32 + __ffs(bits) - 1) | rows << 16;
      }
      number = next;
    }
    __syncthreads();
    return total - first_ - found_;
  }

  // Adds to the listed keys which rows see them, and leaves a barrier behind.
  __device__ void add_rows() {
#pragma unroll 1
    for (int m = 0; m < block_.count; ++m) {
      const std::uint32_t rows = state_.list_rows[m];
      if (rows == 0) continue;
      visit_list(m, block_.existing, [&](int word, std::uint32_t bits) {
        const std::uint32_t listed = bits_[word];
        for (std::uint32_t left = bits & listed; left != 0; left &= left - 1) {
          const int bit = __ffs(left) - 1;
          const std::int32_t number = numbers_[word] + __popc(listed & ((1u << bit) - 1));
          if (number < 0 || number >= found_) continue;
          atomicOr(entries_ + number, rows_that_see(rows, key_of(range_ + word * 32 + bit)) << 16);
        }
      });
    }
    __syncthreads();
  }

  const DecodeParams& params_;
  const DecodeBlock& block_;
  State& state_;
  std::uint32_t* bits_;    // of the range's stripes
  std::int32_t* numbers_;  // of the first key of each word, counted from first_; where rows differ
  ListedKey* entries_;
  int thread_;
  // Of this round: the range's first stripe, how many stripes it has, and how many keys are listed.
  std::int32_t range_ = 0, stripes_ = 0, found_ = 0;
  std::int32_t first_ = 0;  // number of the next round's first key in the range; kNone: the range is done
};

}  // namespace flash_dmattn::internal::cuda
