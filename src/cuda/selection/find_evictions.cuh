// Last kernel: which key each arrival evicts, chunk by chunk.
//
// The window's slots are always full, if one counts empty ones as keys lower than any. So every arrival puts out the
// lowest of the live keys and itself, and what is out never comes back: the first t arrivals of a chunk put out the t
// lowest of themselves and the keys live before the chunk, and the lowest live key is then the next, number t from 0.
// All arrivals can look theirs up at the same time, given how many of the first t arrivals are below any bound.
#pragma once

#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/selection/arrivals.cuh"
#include "cuda/selection/layout.h"
#include "cuda/selection/live_keys.cuh"
#include "cuda/selection/rank_tree.cuh"
#include "cuda/selection/ranked_key.cuh"

namespace flash_dmattn::internal::cuda {

// The t-th lowest (from 0) among the live keys and the chunk's first t arrivals. `sArrivals` are all of the chunk's
// keys by rank, `sLiveBelow` says how many live slots are below each of them.
template <typename Key>
__device__ Key lowest_before(int t, const LiveKeys<Key>& live, const Key* sArrivals, const std::uint16_t* sLiveBelow,
                             const RankTree<kChunkKeys<Key>>& tree) {
  if (sLiveBelow[0] > t) return live[t];
  // Descends to the highest arrival, come or not, that has at most t below it.
  int begin = 0, come_in_node = t, come_below = 0;
  for (int level = 0; level < tree.kLevels; ++level) {
    const int middle = begin + (kChunkKeys<Key> >> (level + 1));
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
  __shared__ SharedLists<Key> sLists;
  __shared__ Key sArrivals[kChunkKeys<Key>];
  __shared__ std::uint16_t sLiveBelow[kChunkKeys<Key>];
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
  const LiveKeys<Key> live = lowest_live_keys(sLists, layout, head_lists, chunk);
  // In the half of the merge's memory that the live keys are not in.
  Tree& tree = *reinterpret_cast<Tree*>(sLists.keys + (live.first < kMergeKeys<Key> ? kMergeKeys<Key> : 0));
  int live_below[kPerThread];
  live.below(by_rank, live_below);
#pragma unroll
  for (int n = 0; n < kPerThread; ++n) {
    const int at = threadIdx.x + n * kThreads;
    sLiveBelow[at] = static_cast<std::uint16_t>(live_below[n]);
    tree.sequence[index_of(by_rank[n]) - first_key] = static_cast<std::uint16_t>(at);
  }
  __syncthreads();
  Key came[kPerThread];  // by index
#pragma unroll
  for (int n = 0; n < kPerThread; ++n) came[n] = sArrivals[tree.sequence[threadIdx.x + n * kThreads]];
  tree.template build<kThreads>();

  const KeyArrivals arrivals(problem, bounds, batch_head / problem.heads);
  std::int32_t* begin = problem.begin + batch_head * problem.keys;
  std::int32_t* end = problem.end + batch_head * problem.keys;
#pragma unroll
  for (int n = 0; n < kPerThread; ++n) {
    if (!takes_part(came[n])) continue;
    const int t = threadIdx.x + n * kThreads;
    write_eviction(came[n], lowest_before(t, live, sArrivals, sLiveBelow, tree), arrivals, begin, end);
  }
}

}  // namespace flash_dmattn::internal::cuda
