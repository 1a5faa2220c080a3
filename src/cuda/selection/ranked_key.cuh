// A key as one integer: its document, if there are several, its rank and, below that, its index, so that no two are
// equal and the newer of two equal scores is higher. And how such integers are searched.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/problem.h"
#include "selection/rank.h"

namespace flash_dmattn::internal::cuda {

__extension__ typedef unsigned __int128 Uint128;

// std::uint32_t for 16-bit scores of few keys, else std::uint64_t, or Uint128 for 64-bit scores.
template <typename Key>
constexpr int kIndexBits = sizeof(Key) == 4 ? 16 : 32;

// Keys of a chunk.
template <typename Key>
constexpr int kChunkKeys = sizeof(Key) == 16 ? 512 : 1024;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffff;

template <typename Key, typename Bits>
__device__ Key make_ranked_key(Bits rank, std::int64_t index) {
  return static_cast<Key>(rank) << kIndexBits<Key> | static_cast<Key>(index);
}
// Of packed documents: Uint128 has room above a rank of 64 bits. All keys of a document are then higher than those of
// the documents before, so that these are evicted first.
constexpr int kDocumentShift = 96;
template <typename Key>
__device__ int document_of(Key key) {
  if constexpr (sizeof(Key) == 16) return static_cast<int>(key >> kDocumentShift);
  return 0;
}
template <typename Key>
__device__ int index_of(Key key) {
  return static_cast<int>(key & ((Key{1} << kIndexBits<Key>)-1));
}
// Whether the key takes part: what is hidden or scores -inf has rank 0 and is below all that do.
template <typename Key>
__device__ bool takes_part(Key key) {
  return key >> kIndexBits<Key> != 0;
}

// How many of `count` ascending keys are lower than `key`. Without branches but the loop's, which the lanes of a warp
// leave together if their counts are alike.
template <typename Key>
__device__ int count_below(const Key* sorted, int count, Key key) {
  unsigned first = 0, left = count;
  for (; left > 1; left -= left / 2) first += sorted[first + left / 2 - 1] < key ? left / 2 : 0;
  return static_cast<int>(left == 1 && sorted[first] < key ? first + 1 : first);
}

// The same for several keys in the same range, so that the latencies of the searches overlap.
template <typename Key, int kCount>
__device__ void count_below(const Key* sorted, int count, const Key (&keys)[kCount], int (&below)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) below[n] = 0;
  unsigned left = count;
  for (; left > 1; left -= left / 2) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) below[n] += sorted[below[n] + left / 2 - 1] < keys[n] ? left / 2 : 0;
  }
#pragma unroll
  for (int n = 0; n < kCount; ++n) below[n] += left == 1 && sorted[below[n]] < keys[n] ? 1 : 0;
}

// At how many positions of [0, size) `before` holds, if it holds up to some position and at none after. A warp asks
// together: 32 probes at a time, since it is the latency of global memory that counts, and the first one at 0.
template <typename Before>
__device__ int warp_partition_point(int size, Before before) {
  const unsigned lane = threadIdx.x % kWarp;
  unsigned first = 0, count = size;  // of the positions that may be the first at which it does not hold
  while (count > 0) {
    const unsigned step = (count + kWarp - 1) / kWarp, probe = lane * step;
    const bool holds = probe < count && before(static_cast<int>(first + probe));
    const unsigned passed = __popc(__ballot_sync(kAllLanes, holds));
    if (passed == 0) break;
    const unsigned known = (passed - 1) * step + 1;
    first += known;
    count = min(count - known, step - 1);
  }
  return static_cast<int>(first);
}

// The key of the lane whose number differs from this one's in the bits of `mask`.
template <typename Key>
__device__ Key shuffle_xor(Key key, int mask) {
  return __shfl_xor_sync(kAllLanes, key, mask);
}
__device__ inline Uint128 shuffle_xor(Uint128 key, int mask) {
  const std::uint64_t high = shuffle_xor(static_cast<std::uint64_t>(key >> 64), mask);
  return static_cast<Uint128>(high) << 64 | shuffle_xor(static_cast<std::uint64_t>(key), mask);
}

template <typename T>
__device__ T warp_sum(T value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

// The sum over this lane and those below it.
__device__ inline int warp_inclusive_sum(int value) {
  const int lane = threadIdx.x % kWarp;
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int lower = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += lower;
  }
  return value;
}

}  // namespace flash_dmattn::internal::cuda
