// The lowest live keys before a chunk, out of the sorted lists that hold the keys before it: a range of ranks in the
// union of up to kMaxLists lists. Samples narrow the lists down to what one block can merge.
#pragma once

#include "cuda/selection/layout.h"
#include "cuda/selection/ranked_key.cuh"

namespace flash_dmattn::internal::cuda {

// Threads of a block that looks for a chunk's evictions: two keys each, so that two searches are under way at a time.
template <typename Key>
constexpr int kEvictionThreads = kChunkKeys<Key> / 2;

// Keys that a block merges at a time.
template <typename Key>
constexpr int kMergeKeys = 2 * kChunkKeys<Key>;

template <typename Key>
struct SharedLists {
  const Key* data[kMaxLists];
  std::int32_t length[kMaxLists];
  std::int32_t begin[kMaxLists], end[kMaxLists];  // of what is left of each list
  std::int32_t offset[kMaxLists + 1];             // of each list's keys among those gathered
  Key keys[2 * kMergeKeys<Key>];                  // to merge back and forth
};

// The list that gathered key `position` is of.
__device__ inline int list_of(const std::int32_t* offset, int position) {
  int list = 0;
#pragma unroll
  for (int step = kMaxLists / 2; step > 0; step /= 2) {
    if (offset[list + step] <= position) list += step;
  }
  return list;
}

// Gathers every key of each list that ends 2^log_stride of them and sorts them all. Returns where in `lists.keys` they
// are.
template <typename Key>
__device__ int gather_sorted(SharedLists<Key>& lists, int list_count, int log_stride) {
  constexpr int kThreads = kEvictionThreads<Key>, kKeysPerThread = kMergeKeys<Key> / kThreads;
  if (threadIdx.x < kWarp) {
    const int lane = threadIdx.x;
    const int sum = warp_inclusive_sum(lane < list_count ? lists.length[lane] >> log_stride : 0);
    lists.offset[lane + 1] = sum;
    if (lane == 0) lists.offset[0] = 0;
  }
  __syncthreads();
  const int total = lists.offset[kMaxLists];
  int from = 0;
  int list_at[kKeysPerThread];  // lists lie one after the other, merged or not: a place always has the same
#pragma unroll
  for (int n = 0; n < kKeysPerThread; ++n) {
    const int i = threadIdx.x + n * kThreads;
    if (i >= total) break;
    const int list = list_at[n] = list_of(lists.offset, i);
    lists.keys[i] = lists.data[list][((i - lists.offset[list] + 1) << log_stride) - 1];
  }
  __syncthreads();
  for (int width = 1; width < list_count; width *= 2) {
#pragma unroll
    for (int n = 0; n < kKeysPerThread; ++n) {
      const int i = threadIdx.x + n * kThreads;
      if (i >= total) break;
      const int list = list_at[n] & -width, other = list ^ width, pair = list & other;
      const int other_begin = lists.offset[other], other_count = lists.offset[other + width] - other_begin;
      const Key key = lists.keys[from + i];
      const int place = i - lists.offset[list] + lists.offset[pair];
      lists.keys[kMergeKeys<Key> - from + place + count_below(lists.keys + from + other_begin, other_count, key)] = key;
    }
    __syncthreads();
    from = kMergeKeys<Key> - from;
  }
  return from;
}

// The sum of a value per list, the same in every thread. Lists share no key, so it is below 2^31.
__device__ inline int sum_over_lists(const std::int32_t* values, int list_count) {
  const int lane = threadIdx.x % kWarp;
  return warp_sum(lane < list_count ? values[lane] : 0);
}

// How many of a chunk's arrivals may be looked at alone, if no live key is lower than `bound`: its highest ones,
// rounded up to a power of two that is a warp's lanes at least. Those below are never live, and put out nothing but
// themselves.
template <typename Key>
__device__ int rivals_of(const Key* sArrivals, Key bound) {
  const int above = kChunkKeys<Key> - count_below(sArrivals, kChunkKeys<Key>, bound);
  return above <= kWarp ? kWarp : 1 << (32 - __clz(above - 1));
}

// Cuts the lists down to few more keys than those of the ranks [first, first + wanted) in their union; returns by how
// much `first` falls. Samples, the last of every `stride` keys, bound ranks: g samples below a key mean that at least
// g * stride keys of the lists are below it, and at most stride - 1 more of each list. No more are wanted than there
// are arrivals above the lowest that may be live.
template <typename Key>
__device__ int narrow(SharedLists<Key>& lists, int list_count, int total, int first, const Key* sArrivals,
                      int& wanted) {
  // The coarsest that leaves no more than a block merges, if so few samples can.
  int log_stride = 1;
  const auto most_left = [&](int stride) { return wanted + 2 * stride + 2 * list_count * (stride - 1); };
  while (most_left(2 << log_stride) <= kMergeKeys<Key> || total >> log_stride > kMergeKeys<Key>) ++log_stride;
  const Key* samples = lists.keys + gather_sorted(lists, list_count, log_stride);
  const int sample_count = lists.offset[kMaxLists];
  const int surely_below = first - list_count * ((1 << log_stride) - 1);
  const bool has_low = surely_below >= 0;
  const Key low_key = has_low ? samples[surely_below >> log_stride] : Key{0};
  if (has_low) wanted = min(wanted, rivals_of(sArrivals, low_key));
  const int high = (first + (wanted - 1)) >> log_stride;
  const bool has_high = high < sample_count;
  const Key high_key = has_high ? samples[high] : Key{0};
  for (int task = threadIdx.x / kWarp; task < 2 * list_count; task += kEvictionThreads<Key> / kWarp) {
    const bool is_begin = task < list_count;
    const int list = is_begin ? task : task - list_count, length = lists.length[list];
    const Key* data = lists.data[list];
    const Key bound = is_begin ? low_key : high_key;
    int cut = is_begin ? 0 : length;
    if (is_begin ? has_low : has_high) {
      cut = warp_partition_point(length, [&](int i) { return data[i] < bound || (!is_begin && data[i] == bound); });
    }
    if (threadIdx.x % kWarp == 0) (is_begin ? lists.begin : lists.end)[list] = cut;
  }
  __syncthreads();
  if (threadIdx.x < list_count) {
    lists.data[threadIdx.x] += lists.begin[threadIdx.x];
    lists.length[threadIdx.x] = lists.end[threadIdx.x] - lists.begin[threadIdx.x];
  }
  __syncthreads();
  return sum_over_lists(lists.begin, list_count);
}

// The lists that together hold the keys before a chunk, without the keys that take no part. Returns their number.
template <typename Key>
__device__ int lists_before(SharedLists<Key>& lists, const ListLayout& layout, const Key* head_lists, int chunk) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned bits = chunk;
  const int list_count = layout.levels == 1 ? chunk : __popc(bits);
  for (int bit_or_chunk = warp; bit_or_chunk < kMaxLists; bit_or_chunk += kEvictionThreads<Key> / kWarp) {
    int slot = bit_or_chunk, level = 0;
    int list = bit_or_chunk;
    if (layout.levels == 1) {
      if (bit_or_chunk >= list_count) continue;
    } else {
      if ((bits >> bit_or_chunk & 1) == 0) continue;
      slot = __popc(bits & ((1u << bit_or_chunk) - 1));
      level = bit_or_chunk;
      list = (chunk >> level) - 1;
    }
    const Key* data = head_lists + layout.list_at(level, list);
    const auto best = static_cast<int>(layout.best_at(level));
    const int idle = warp_partition_point(best, [&](int i) { return !takes_part(data[i]); });
    if (lane == 0) {
      lists.data[slot] = data + idle;
      lists.length[slot] = best - idle;
    }
  }
  __syncthreads();
  return list_count;
}

// The lowest live keys before a chunk, as many as the chunk has arrivals that may be higher than the lowest of them, or
// the window slots: first `empty` slots, which are lower than any key, then `count` keys from lists.keys[first] on,
// ascending.
template <typename Key>
struct LiveKeys {
  const SharedLists<Key>& lists;
  int empty, first, count;

  // How many slots are lower than each key.
  template <int kCount>
  __device__ void below(const Key (&keys)[kCount], int (&slots)[kCount]) const {
    count_below(lists.keys + first, count, keys, slots);
#pragma unroll
    for (int n = 0; n < kCount; ++n) slots[n] += empty;
  }
  // An empty slot is a key that takes no part.
  __device__ Key operator[](int slot) const { return slot < empty ? Key{0} : lists.keys[first + slot - empty]; }
};

template <typename Key>
__device__ LiveKeys<Key> lowest_live_keys(SharedLists<Key>& lists, const ListLayout& layout, const Key* head_lists,
                                          int chunk, const Key* sArrivals) {
  const int slots = static_cast<int>(layout.best_at(0)), window = static_cast<int>(layout.window);
  const int list_count = lists_before(lists, layout, head_lists, chunk);
  int total = sum_over_lists(lists.length, list_count);
  int first = total - window;  // of the live keys among all by rank
  const int empty = first >= 0 ? 0 : min(-first, slots);
  int wanted = slots - empty;
  if (wanted == 0) return {lists, empty, 0, 0};
  first = max(first, 0);
  while (total > kMergeKeys<Key>) {
    first -= narrow(lists, list_count, total, first, sArrivals, wanted);
    total = sum_over_lists(lists.length, list_count);
  }
  return {lists, empty, gather_sorted(lists, list_count, 0) + first, wanted};
}

}  // namespace flash_dmattn::internal::cuda
