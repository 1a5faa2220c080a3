// Kernel for heads of many chunks: the lists of one level from those of the level below, two by two.
#pragma once

#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/selection/layout.h"
#include "cuda/selection/ranked_key.cuh"

namespace flash_dmattn::internal::cuda {

constexpr int kMergeThreads = 256;

// Keys that a block writes: 8 KiB, so that static shared memory holds them twice and several blocks fit a processor.
template <typename Key>
constexpr int kMergeTile = 8192 / sizeof(Key);

// How many of the lowest `rank` keys of two ascending lists, `count` keys each, are of the first.
template <typename Key>
__device__ std::int64_t warp_merge_split(const Key* first, const Key* second, std::int64_t count, std::int64_t rank) {
  const std::int64_t least = rank > count ? rank - count : 0, most = rank < count ? rank : count;
  return least + warp_partition_point(static_cast<int>(most - least),
                                      [&](int i) { return first[least + i] < second[rank - 1 - (least + i)]; });
}

// A block per (batch, head, list, tile).
template <typename Key>
__global__ void __launch_bounds__(kMergeThreads)
    merge_lists(const __grid_constant__ ListLayout layout, Key* lists, int level, std::int64_t first_block) {
  __shared__ Key sIn[kMergeTile<Key>], sOut[kMergeTile<Key>];
  __shared__ std::int64_t sSplits[2];

  begin_dependent_kernel();
  const std::int64_t kept = layout.best_at(level), tiles = (kept + kMergeTile<Key> - 1) / kMergeTile<Key>;
  const std::int64_t block = first_block + blockIdx.x;
  const std::int64_t tile = block % tiles, list = block / tiles % layout.lists_at(level);
  Key* head_lists = lists + block / tiles / layout.lists_at(level) * layout.head_keys;
  const Key* first = head_lists + layout.list_at(level - 1, 2 * list);
  const Key* second = head_lists + layout.list_at(level - 1, 2 * list + 1);
  Key* merged = head_lists + layout.list_at(level, list) + tile * kMergeTile<Key>;

  const std::int64_t count = layout.best_at(level - 1), dropped = 2 * count - kept;
  const std::int64_t from = dropped + tile * kMergeTile<Key>;
  const std::int64_t to = from + kMergeTile<Key> < 2 * count ? from + kMergeTile<Key> : 2 * count;
  const int warp = threadIdx.x / kWarp;
  if (warp < 2) {
    const std::int64_t split = warp_merge_split(first, second, count, warp == 0 ? from : to);
    if (threadIdx.x % kWarp == 0) sSplits[warp] = split;
  }
  __syncthreads();
  first += sSplits[0];
  second += from - sSplits[0];
  const int in_first = static_cast<int>(sSplits[1] - sSplits[0]), in_tile = static_cast<int>(to - from);
  for (int i = threadIdx.x; i < in_tile; i += kMergeThreads) sIn[i] = i < in_first ? first[i] : second[i - in_first];
  __syncthreads();
  for (int i = threadIdx.x; i < in_tile; i += kMergeThreads) {
    const Key key = sIn[i];
    const int lower = i < in_first ? count_below(sIn + in_first, in_tile - in_first, key) + i
                                   : count_below(sIn, in_first, key) + i - in_first;
    sOut[lower] = key;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < in_tile; i += kMergeThreads) merged[i] = sOut[i];
}

}  // namespace flash_dmattn::internal::cuda
