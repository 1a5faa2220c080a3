// The keys that rows of a block list (KeyIndices) and see, found by all threads of the block together.
//
// A bit for each key is set in shared memory: there repeats, and keys that several rows list, count once. The keys
// whose bits are set are numbered in order, and each split takes an equal part of the numbers, wherever its keys lie.
// So every block reads all lists of its rows, which are short beside the keys and values that they name; of the cache
// nothing is looked at but what is listed, and of long caches 32 keys a word. What comes out depends on nothing but
// which keys are listed, so that repeated runs give identical bits.
//
// Rounds: bits and numbers take the memory of the tiles, which is enough for 128k to 256k keys. More keys are gone
// through in ranges, of each of which a split takes its part. What a round finds is at most kRoundKeys, within 2^16
// keys; if there are more, the bits are made again when those have been attended.
#pragma once

#include <cstdint>

#include "cuda/decode/config.h"
#include "cuda/decode/key_list.cuh"
#include "cuda/plan/row_list.cuh"
#include "cuda/plan/visibility.cuh"

namespace flash_dmattn::internal::cuda {

// Keys that have been found, a warp's part. As KeyList it hands out tiles.
template <int kTileKeys>
class FoundKeys {
 public:
  __device__ FoundKeys(const ListedKey* entries, int count) : entries_(entries), left_(count) {}

  // The next tile: lane l has its key l, or 0. All are 0 when there is none.
  __device__ ListedKey next_tile() {
    const int lane = static_cast<int>(threadIdx.x) % 32, taken = min(left_, kTileKeys);
    left_ -= taken;
    return lane < taken ? entries_[left_ + lane] : 0;
  }

 private:
  const ListedKey* entries_;
  int left_;
};

template <int kHeadDim>
class KeyUnion {
  using Config = DecodeConfig<kHeadDim>;
  static constexpr int kThreads = Config::kThreads, kWarps = Config::kWarps;

 public:
  using List = FoundKeys<Config::kTileKeys>;
  static constexpr int kRoundKeys = kWarps * Config::kListKeys;
  static constexpr int kRangeWords = static_cast<int>(Config::kTilesBytes / (2 * sizeof(std::uint32_t)));
  static constexpr std::int32_t kRangeKeys = 32 * kRangeWords;

  struct State {
    std::uint32_t list_rows[kDecodeRows];  // of rows that share a list, the first has bits for all, the others 0
    std::int32_t range;                    // first key of the range of the next round
    std::int32_t next;                     // number of the next round's first key, -1: the first of the split
    std::int32_t found;                    // keys of this round
    std::int32_t warp_counts[kWarps];
  };

  // `memory`: that of the tiles. `entries`: kRoundKeys.
  __device__ KeyUnion(const DecodeParams& params, DecodeBlock& block, State& state, unsigned char* memory,
                      ListedKey* entries)
      : params_(params),
        block_(block),
        state_(state),
        bits_(reinterpret_cast<std::uint32_t*>(memory)),
        numbers_(reinterpret_cast<std::int32_t*>(memory) + kRangeWords),
        entries_(entries),
        thread_(static_cast<int>(threadIdx.x)) {
    if (thread_ == 0) state.range = 0, state.next = -1;
    if (thread_ >= kDecodeRows) return;
    std::uint32_t rows = 0;
    for (int m = 0; m < block.count && thread_ < block.count; ++m) {
      const bool same = (!params.list_by_row || block.row(m) == block.row(thread_)) &&
                        (!params.list_by_head || block.head(m) == block.head(thread_));
      rows |= std::uint32_t{same} << m;
    }
    if (params.uniform) rows &= 1;  // its first row speaks for all
    state.list_rows[thread_] = (rows & ((1u << thread_) - 1)) == 0 ? rows : 0;
  }

  // Finds the keys of the next round, which count from block.begin then. False: there are no more.
  __device__ bool find_next() {
    for (;;) {
      __syncthreads();  // tiles, entries and block.begin are no longer read; state is written
      const std::int32_t range = state_.range, next = state_.next;
      const std::int32_t limit = causal_limit(params_.visibility, block_.existing, block_.row(block_.count - 1));
      if (range >= limit) return false;
      const std::int32_t keys = min(limit - range, kRangeKeys);
      set_bits(range, keys);
      const std::int32_t count = count_keys(keys);
      const auto part_of = [&](std::int32_t split) {
        return static_cast<std::int32_t>(std::int64_t{count} * split / params_.splits);
      };
      const std::int32_t first = next < 0 ? part_of(block_.split) : next, end = part_of(block_.split + 1);
      if (first < end) {
        number_keys(range, keys, first, min(end - first, kRoundKeys));
        list_keys(range, keys, first);
        if (!params_.uniform) add_rows(range, keys, first);
      }
      // What is written here is read behind the barrier at the beginning.
      const bool is_last = first == end || first + state_.found == end;
      if (thread_ == 0) {
        state_.range = is_last ? range + keys : range;
        state_.next = is_last ? -1 : first + state_.found;
      }
      if (first < end) return true;
    }
  }

  __device__ List list_of_warp() const {
    const int warp = thread_ / 32, found = state_.found, share = (found + kWarps - 1) / kWarps;
    const int begin = min(warp * share, found);
    return List(entries_ + begin, min(share, found - begin));
  }

 private:
  // visit(word, bits) for what the list of row m names of the `keys` keys from `range` on, 32 keys a word.
  template <typename Visit>
  __device__ void visit_list(int m, std::int32_t range, std::int32_t keys, Visit visit) const {
    constexpr int kBatch = 8;  // entries of a thread that are read at the same time
    const RowList list = list_of_row(params_.indices, block_.batch, block_.head(m), block_.row(m));
    const int step = kThreads / params_.entry_threads, part = thread_ % params_.entry_threads;
#pragma unroll 1
    for (std::int64_t i = thread_ / params_.entry_threads; i < list.count; i += kBatch * step) {
      std::int32_t entries[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        entries[j] = i + j * step < list.count ? __ldg(list.entries + (i + j * step) * list.stride) : -1;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        // A negative entry ends with key 0 or before it.
        const std::int64_t named = entries[j] * params_.indices.block_size - range;
        if (named >= keys || named + params_.indices.block_size <= 0) continue;
        const auto begin = static_cast<std::int32_t>(max(named, std::int64_t{0}));
        const auto end = static_cast<std::int32_t>(min(named + params_.indices.block_size, std::int64_t{keys}));
#pragma unroll 1
        for (int word = begin / 32 + part; word * 32 < end; word += params_.entry_threads) {
          visit(word, bit_range(begin - word * 32, end - word * 32));
        }
      }
    }
  }

  __device__ bool has_rules() const { return params_.mask.defined() || params_.visibility.begin.defined(); }

  // Those of `rows` that see a key that they list.
  __device__ std::uint32_t rows_that_see(std::uint32_t rows, std::int32_t key) const {
    // What the first row sees by the causal rule, all do.
    const std::int32_t least = causal_limit(params_.visibility, block_.existing, block_.row(__ffs(rows) - 1));
    if (!has_rules() && key < least) return rows;
    std::uint32_t words[1] = {};
    for (; rows != 0; rows &= rows - 1) add_row(params_, block_, key, block_.existing, __ffs(rows) - 1, words);
    return words[0];
  }

  // Sets the bits of keys that some row lists and sees, and leaves a barrier behind.
  __device__ void set_bits(std::int32_t range, std::int32_t keys) {
    if (thread_ == 0) block_.begin = 0;  // for add_row
    for (int word = thread_; word * 32 < keys; word += kThreads) bits_[word] = 0;
    __syncthreads();
#pragma unroll 1
    for (int m = 0; m < block_.count; ++m) {
      const std::uint32_t rows = state_.list_rows[m];
      if (rows == 0) continue;
      // The last of the rows sees most.
      const int last = 31 - __clz(rows);
      const std::int32_t limit = causal_limit(params_.visibility, block_.existing, block_.row(last));
      visit_list(m, range, min(limit - range, keys), [&](int word, std::uint32_t bits) {
        std::uint32_t seen = bits;
        if (has_rules()) {
          for (std::uint32_t left = bits; left != 0; left &= left - 1) {
            const int bit = __ffs(left) - 1;
            if (rows_that_see(rows, range + word * 32 + bit) == 0) seen &= ~(1u << bit);
          }
        }
        if (seen != 0) atomicOr(bits_ + word, seen);
      });
    }
    __syncthreads();
  }

  // Neighbouring words of a thread: an odd number, so that threads are at different banks.
  static __device__ int words_of_thread(std::int32_t keys) { return ((keys + 31) / 32 + kThreads - 1) / kThreads | 1; }

  // visit(word, bits) for words first, first + step, ... below `end`, a few of which are read at the same time.
  template <typename Visit>
  __device__ void visit_words(int first, int end, int step, Visit visit) const {
    constexpr int kBatch = 4;
#pragma unroll 1
    for (; first < end; first += kBatch * step) {
      std::uint32_t bits[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) bits[i] = first + i * step < end ? bits_[first + i * step] : 0;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * step < end) visit(first + i * step, bits[i]);
      }
    }
  }

  // How many bits are set. Leaves to number_keys how many each warp has, and thread_count_.
  __device__ std::int32_t count_keys(std::int32_t keys) {
    const int lane = thread_ % 32, words = words_of_thread(keys), begin = thread_ * words;
    std::int32_t count = 0;
    visit_words(begin, min(begin + words, (keys + 31) / 32), 1,
                [&](int, std::uint32_t bits) { count += __popc(bits); });
    std::int32_t until = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t before = __shfl_up_sync(~0u, until, step);
      if (lane >= step) until += before;
    }
    if (lane == 31) state_.warp_counts[thread_ / 32] = until;
    thread_count_ = until - count;
    __syncthreads();
    std::int32_t total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += state_.warp_counts[w];
    return total;
  }

  // Gives each word the number of its first key. The round begins with key number `first`, which becomes block.begin,
  // and has `count` keys, if they are not too far apart.
  __device__ void number_keys(std::int32_t range, std::int32_t keys, std::int32_t first, std::int32_t count) {
    const int words = words_of_thread(keys), begin = thread_ * words;
    std::int32_t number = thread_count_;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) number += w < thread_ / 32 ? state_.warp_counts[w] : 0;
    visit_words(begin, min(begin + words, (keys + 31) / 32), 1, [&](int word, std::uint32_t bits) {
      numbers_[word] = number;
      const std::int32_t next = number + __popc(bits);
      if (number <= first && first < next) {
        for (; number < first; ++number) bits &= bits - 1;
        block_.begin = range + word * 32 + __ffs(bits) - 1;
      }
      number = next;
    });
    if (thread_ == 0) state_.found = count;
    __syncthreads();
  }

  __device__ void list_keys(std::int32_t range, std::int32_t keys, std::int32_t first) {
    // Rows that the block does not have may see all.
    const std::uint32_t rows = params_.uniform ? kAllRows : kAllRows & ~0u << block_.count;
    const std::int32_t begin = block_.begin, count = state_.found;
    __syncthreads();  // found is read
    // By words in turn: where many neighbours are listed, they are many threads' work.
    visit_words(thread_, (keys + 31) / 32, kThreads, [&](int word, std::uint32_t bits) {
      if (bits == 0) return;
      std::int32_t number = numbers_[word] - first;  // less than 0: those of splits before
      if (number >= count || number + __popc(bits) <= 0) return;
#pragma unroll 1
      for (; bits != 0 && number < count; bits &= bits - 1, ++number) {
        const std::int32_t distance = range + word * 32 + __ffs(bits) - 1 - begin;
        if (number < 0) continue;
        if (distance < kMostSplitKeys) {
          entries_[number] = static_cast<std::uint32_t>(distance) | rows << 16;
        } else {
          atomicMin(&state_.found, number);
        }
      }
    });
    __syncthreads();
  }

  // Adds to the listed keys which rows see them.
  __device__ void add_rows(std::int32_t range, std::int32_t keys, std::int32_t first) {
    const std::int32_t found = state_.found;
#pragma unroll 1
    for (int m = 0; m < block_.count; ++m) {
      const std::uint32_t rows = state_.list_rows[m];
      if (rows == 0) continue;
      visit_list(m, range, keys, [&](int word, std::uint32_t bits) {
        const std::uint32_t listed = bits_[word];
        for (std::uint32_t left = bits & listed; left != 0; left &= left - 1) {
          const int bit = __ffs(left) - 1;
          const std::int32_t number = numbers_[word] - first + __popc(listed & ((1u << bit) - 1));
          if (number < 0 || number >= found) continue;
          atomicOr(entries_ + number, rows_that_see(rows, range + word * 32 + bit) << 16);
        }
      });
    }
    __syncthreads();
  }

  const DecodeParams& params_;
  DecodeBlock& block_;
  State& state_;
  std::uint32_t* bits_;    // of the range's keys
  std::int32_t* numbers_;  // of the first key of each word
  ListedKey* entries_;
  int thread_;
  std::int32_t thread_count_ = 0;  // keys of the warp in front of the thread's words
};

}  // namespace flash_dmattn::internal::cuda
