// First kernel: every chunk's keys sorted by rank, and the intervals as they are if nothing is ever evicted.
#pragma once

#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/selection/arrivals.cuh"
#include "cuda/selection/layout.h"
#include "cuda/selection/ranked_key.cuh"

namespace flash_dmattn::internal::cuda {

// Ascending by lane: a bitonic network.
template <typename Key>
__device__ Key warp_sort(Key key) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int run = 2; run <= kWarp; run *= 2) {
#pragma unroll
    for (int distance = run / 2; distance > 0; distance /= 2) {
      const Key other = shuffle_xor(key, distance);
      const bool ascending = (lane & run) == 0, lower_lane = (lane & distance) == 0;
      if ((key < other) != (ascending == lower_lane)) key = other;
    }
  }
  return key;
}

// One key a thread, ascending by thread. Warps sort, then runs are merged pairwise: a key's place is its own in its run
// plus the number of lower keys in the other one.
template <typename Key>
__device__ Key block_sort(Key key, Key (*sRuns)[kChunkKeys<Key>]) {
  const int thread = threadIdx.x;
  key = warp_sort(key);
  int buffer = 0;
  sRuns[buffer][thread] = key;
  __syncthreads();
#pragma unroll
  for (int run = kWarp; run < kChunkKeys<Key>; run *= 2) {
    const Key* other_run = sRuns[buffer] + ((thread & ~(run - 1)) ^ run);
    const int place = (thread & ~(2 * run - 1)) + (thread & (run - 1)) + count_below(other_run, run, key);
    buffer ^= 1;
    sRuns[buffer][place] = key;
    __syncthreads();
    key = sRuns[buffer][thread];
  }
  return key;
}

// A block per (batch, head, chunk), a thread per key. `lists` is null if no key can be evicted. KeyArrivals: Arrivals
// or PackedArrivals, which `bounds` are for.
template <typename Format, typename Key, typename KeyArrivals>
__global__ void __launch_bounds__(kChunkKeys<Key>)
    sort_chunks(const __grid_constant__ SelectionProblem problem, const __grid_constant__ ListLayout layout,
                const std::int32_t* bounds, Key* lists, std::int64_t first_block) {
  using Bits = typename Format::Bits;
  __shared__ Key sRuns[2][kChunkKeys<Key>];

  begin_dependent_kernel();
  const std::int64_t block = first_block + blockIdx.x;
  const std::int64_t batch_head = block / layout.chunks, chunk = block % layout.chunks;
  const std::int64_t batch = batch_head / problem.heads, head = batch_head % problem.heads;
  const std::int64_t key = chunk * kChunkKeys<Key> + threadIdx.x;
  const Arrival arrival = KeyArrivals(problem, bounds, batch).of(key);

  Bits rank = 0;
  if (problem.window > 0 && arrival.exists()) {
    const auto* scores = static_cast<const Bits*>(problem.scores);
    const std::int64_t mask_at =
        batch * problem.mask_strides[0] + head * problem.mask_strides[1] + key * problem.mask_strides[2];
    if (problem.key_mask == nullptr || problem.key_mask[mask_at] != 0) {
      rank = rank_of<Format>(
          scores[batch * problem.score_strides[0] + head * problem.score_strides[1] + key * problem.score_strides[2]]);
    }
  }
  if (key < problem.keys) {
    const std::int64_t at = batch_head * problem.keys + key;
    problem.begin[at] = rank != 0 ? arrival.first_row : 0;
    problem.end[at] = rank != 0 ? arrival.end_row : 0;
  }
  if (lists == nullptr) return;
  Key ranked = make_ranked_key<Key>(rank, key);
  if constexpr (sizeof(Key) == 16) {
    if (rank != 0) ranked |= static_cast<Key>(arrival.document) << kDocumentShift;
  }
  lists[batch_head * layout.head_keys + chunk * kChunkKeys<Key> + threadIdx.x] = block_sort(ranked, sRuns);
}

}  // namespace flash_dmattn::internal::cuda
