// A wavelet tree (Navarro, "Wavelet trees for all", 2014) over a permutation of [0, size): how many of its first
// values are below a bound, for all the bounds of one binary search. Since the values are a permutation every node is
// full and half of its bits are ones, so where nodes begin need not be stored.
#pragma once

#include <cstdint>

#include "cuda/selection/ranked_key.cuh"

namespace flash_dmattn::internal::cuda {

template <int kMostSize>
struct RankTree {
  static constexpr int kMostWords = kMostSize / kWarp;
  static_assert(kMostWords <= kWarp);

  static constexpr int log2(int size) { return size == 1 ? 0 : 1 + log2(size / 2); }
  static constexpr int kMostLevels = log2(kMostSize);

  // Of each level: the bit that decides between left and right, for the values in the order of the level's nodes and
  // then of the permutation; and the number of ones before each word. One more word, so that the size may be asked for.
  std::uint32_t bits[kMostLevels][kMostWords + 1];
  std::uint16_t ones[kMostLevels][kMostWords + 1];
  std::uint16_t sequence[kMostSize];

  // By kThreads threads together, after `sequence` is written and before it is needed again: it is used up. `size`, a
  // power of two, is a warp's lanes at least.
  template <int kThreads>
  __device__ void build(int size) {
    constexpr int kPerThread = kMostSize / kThreads;
    const unsigned thread = threadIdx.x, lane = thread % kWarp, words = size / kWarp;
    if (thread < kMostLevels && size >> thread > 1) {
      bits[thread][words] = 0;
      ones[thread][words] = static_cast<std::uint16_t>(size / 2);
    }
    // Whole warps have values, or none.
    const auto exists = [&](int n) { return thread + n * kThreads < static_cast<unsigned>(size); };
    unsigned values[kPerThread] = {};
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      if (exists(n)) values[n] = sequence[thread + n * kThreads];
    }
    for (unsigned node = size, level = 0; node > 1; node /= 2, ++level) {
      std::uint32_t votes[kPerThread];
#pragma unroll
      for (int n = 0; n < kPerThread; ++n) {
        if (!exists(n)) continue;
        votes[n] = __ballot_sync(kAllLanes, (values[n] & node / 2) != 0);
        if (lane == 0) bits[level][(thread + n * kThreads) / kWarp] = votes[n];
      }
      int exclusive = lane * (kWarp / 2);  // where words hold whole nodes; half of a node are ones
      if (node > kWarp) {
        __syncthreads();
        const int in_word = lane < words ? __popc(bits[level][lane]) : 0;
        exclusive = warp_inclusive_sum(in_word) - in_word;
      } else {
        __syncwarp();
      }
#pragma unroll
      for (int n = 0; n < kPerThread; ++n) {
        if (!exists(n)) continue;
        const unsigned position = thread + n * kThreads, begin = position & -node;
        const int before = __shfl_sync(kAllLanes, exclusive, position / kWarp);
        if (lane == 0) ones[level][position / kWarp] = static_cast<std::uint16_t>(before);
        const unsigned ones_before = before + __popc(votes[n] & ((1u << lane) - 1)) - begin / 2;
        const unsigned place = (values[n] & node / 2) != 0 ? begin + node / 2 + ones_before : position - ones_before;
        sequence[place] = static_cast<std::uint16_t>(values[n]);
      }
      if (node > kWarp) {
        __syncthreads();
      } else {
        __syncwarp();
      }
#pragma unroll
      for (int n = 0; n < kPerThread; ++n) {
        if (exists(n)) values[n] = sequence[thread + n * kThreads];
      }
    }
    __syncthreads();
  }

  // Among the first `in_node` values of the node [begin, begin + size >> level): how many are in its left half.
  __device__ int left_of(int level, int begin, int in_node) const {
    const unsigned position = begin + in_node, word = position / kWarp;
    const std::uint32_t before = bits[level][word] & ((1u << position % kWarp) - 1);
    return in_node + (begin >> 1) - ones[level][word] - __popc(before);
  }
};

}  // namespace flash_dmattn::internal::cuda
