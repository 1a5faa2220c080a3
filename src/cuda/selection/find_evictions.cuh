// Last kernel: which key each arrival evicts, chunk by chunk.
//
// The window's slots are always full, if one counts empty ones as keys lower than any. So every arrival puts out the
// lowest of the live keys and itself, and what is out never comes back: the first t arrivals of a chunk put out the t
// lowest of themselves and the keys live before the chunk, and the lowest live key is then the next, number t from 0.
// All arrivals can look theirs up at the same time, given how many of the first t arrivals are below any bound. Those
// below the lowest key that was live before the chunk put out themselves, and the others need not know of them: of
// random scores these are about window / t of a chunk that begins at key t.
#pragma once

#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/selection/arrivals.cuh"
#include "cuda/selection/layout.h"
#include "cuda/selection/live_keys.cuh"
#include "cuda/selection/rank_tree.cuh"
#include "cuda/selection/ranked_key.cuh"

namespace flash_dmattn::internal::cuda {

// The t-th lowest (from 0) among the live keys and the first t of `size` arrivals. `sArrivals` are these by rank,
// `sLiveBelow` says how many live slots are below each of them.
template <typename Key>
__device__ Key lowest_before(int t, const LiveKeys<Key>& live, const Key* sArrivals, const std::uint16_t* sLiveBelow,
                             const RankTree<kChunkKeys<Key>>& tree, int size) {
  if (sLiveBelow[0] > t) return live[t];
  // Descends to the highest arrival, come or not, that has at most t below it.
  int begin = 0, come_in_node = t, come_below = 0;
  for (int level = 0; size >> level > 1; ++level) {
    const int middle = begin + (size >> (level + 1));
    const int left = tree.left_of(level, begin, come_in_node);
    if (come_below + left + sLiveBelow[middle] > t) {
      come_in_node = left;
    } else {
      come_below += left;
      come_in_node -= left;
      begin = middle;
    }
  }
  const int beyond = t - come_below - sLiveBelow[begin];
  if (come_in_node == 1 && beyond == 0) return sArrivals[begin];
  return live[sLiveBelow[begin] + beyond - come_in_node];
}

// What an arrival does to the intervals of its head, which are those of keys that stay: it is never seen itself, or it
// ends another's, which no row has seen if it began at the same one. Those of other documents end by themselves.
template <typename Key, typename KeyArrivals>
__device__ void write_eviction(Key arrival, Key lowest, const KeyArrivals& arrivals, std::int32_t* begin,
                               std::int32_t* end) {
  const int key = index_of(arrival), evicted = index_of(lowest), document = document_of(arrival);
  if (arrival < lowest) {
    begin[key] = end[key] = 0;
  } else if (takes_part(lowest) && document_of(lowest) == document) {
    const std::int32_t row = arrivals.first_row(document, key);
    if (arrivals.first_row(document, evicted) == row) {
      begin[evicted] = end[evicted] = 0;
    } else {
      end[evicted] = row;
    }
  }
}

// A block per (batch, head, chunk). `bounds`: as for sort_chunks.
template <typename Key, typename KeyArrivals>
__global__ void __launch_bounds__(kEvictionThreads<Key>, 2)
    find_evictions(const __grid_constant__ SelectionProblem problem, const __grid_constant__ ListLayout layout,
                   const std::int32_t* bounds, const Key* lists, std::int64_t first_block) {
  using Tree = RankTree<kChunkKeys<Key>>;
  constexpr int kThreads = kEvictionThreads<Key>, kPerThread = kChunkKeys<Key> / kThreads;
  static_assert(kPerThread == 2);
  __shared__ SharedLists<Key> sLists;
  __shared__ Key sArrivals[kChunkKeys<Key>];  // by rank
  __shared__ std::uint16_t sLiveBelow[kChunkKeys<Key>];
  __shared__ std::uint32_t sIsRival[kChunkKeys<Key> / kWarp];  // by index, a bit each
  static_assert(sizeof(Tree) <= sizeof(Key) * kMergeKeys<Key>);

  begin_dependent_kernel();
  const std::int64_t block = first_block + blockIdx.x;
  const std::int64_t batch_head = block / layout.chunks;
  const int chunk = static_cast<int>(block - batch_head * layout.chunks), first_key = chunk * kChunkKeys<Key>;
  const Key* head_lists = lists + batch_head * layout.head_keys;
  // Loaded before the test below, so that their latencies overlap.
  Key by_rank[kPerThread];
#pragma unroll
  for (int n = 0; n < kPerThread; ++n) by_rank[n] = head_lists[first_key + threadIdx.x + n * kThreads];
  if (!takes_part(head_lists[first_key + kChunkKeys<Key> - 1])) return;

#pragma unroll
  for (int n = 0; n < kPerThread; ++n) sArrivals[threadIdx.x + n * kThreads] = by_rank[n];
  if (threadIdx.x < kChunkKeys<Key> / kWarp) sIsRival[threadIdx.x] = 0;
  __syncthreads();
  const LiveKeys<Key> live = lowest_live_keys(sLists, layout, head_lists, chunk, sArrivals);
  // The arrivals that may be live at all: the highest ones. From here on these are numbered for themselves.
  const int rivals = rivals_of(sArrivals, live[0]), others = kChunkKeys<Key> - rivals;
  const auto exists = [&](int n) { return static_cast<int>(threadIdx.x) + n * kThreads < rivals; };  // of whole warps
  std::int32_t* begin = problem.begin + batch_head * problem.keys;
  std::int32_t* end = problem.end + batch_head * problem.keys;
  Key rival[kPerThread] = {};  // by rank
#pragma unroll
  for (int n = 0; n < kPerThread; ++n) {
    const int at = threadIdx.x + n * kThreads;
    if (at < others && takes_part(by_rank[n])) begin[index_of(by_rank[n])] = end[index_of(by_rank[n])] = 0;
    if (!exists(n)) continue;
    rival[n] = sArrivals[others + at];
    const unsigned index = index_of(rival[n]) - first_key;
    atomicOr(&sIsRival[index / kWarp], 1u << index % kWarp);
  }
  int live_below[kPerThread];
  if (exists(kPerThread - 1)) {
    live.below(rival, live_below);
  } else if (exists(0)) {
    const Key first[1] = {rival[0]};
    int below_first[1];
    live.below(first, below_first);
    live_below[0] = below_first[0];
  }
  __syncthreads();
  // In the half of the merge's memory that the live keys are not in.
  Tree& tree = *reinterpret_cast<Tree*>(sLists.keys + (live.first < kMergeKeys<Key> ? kMergeKeys<Key> : 0));
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::uint32_t word = lane < kChunkKeys<Key> / kWarp ? sIsRival[lane] : 0;
  const int before_word = warp_inclusive_sum(__popc(word)) - __popc(word);
#pragma unroll
  for (int n = 0; n < kPerThread; ++n) {
    if (!exists(n)) continue;
    const int at = threadIdx.x + n * kThreads;
    const unsigned index = index_of(rival[n]) - first_key;
    const std::uint32_t earlier = sIsRival[index / kWarp] & ((1u << index % kWarp) - 1);
    sLiveBelow[at] = static_cast<std::uint16_t>(live_below[n]);
    tree.sequence[__shfl_sync(kAllLanes, before_word, index / kWarp) + __popc(earlier)] =
        static_cast<std::uint16_t>(at);
  }
  __syncthreads();
  Key came[kPerThread] = {};  // by index
#pragma unroll
  for (int n = 0; n < kPerThread; ++n) {
    if (exists(n)) came[n] = sArrivals[others + tree.sequence[threadIdx.x + n * kThreads]];
  }
  tree.template build<kThreads>(rivals);

  const KeyArrivals arrivals(problem, bounds, batch_head / problem.heads);
#pragma unroll
  for (int n = 0; n < kPerThread; ++n) {
    if (!exists(n) || !takes_part(came[n])) continue;
    const int t = threadIdx.x + n * kThreads;
    const Key lowest = lowest_before(t, live, sArrivals + others, sLiveBelow, tree, rivals);
    write_eviction(came[n], lowest, arrivals, begin, end);
  }
}

}  // namespace flash_dmattn::internal::cuda
