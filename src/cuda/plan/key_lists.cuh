// Which keys a chunk of rows lists, and in which order: what blocks of make_plan.cu do first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/plan/chunk_rules.cuh"

namespace flash_dmattn::internal::cuda {

// Of a block; warps are at most as many as a warp has lanes. A multiprocessor has registers for two blocks, and while
// one waits for memory the other one works.
constexpr int kPlanWarps = 16, kPlanThreads = 32 * kPlanWarps, kPlanBlocks = 2;
constexpr int kScanKeys = 8;  // keys of a lane that are in flight together while all keys are looked at
constexpr int kListKeys = 4;  // the same while units are worked out
// The order of a list: bin b of the first kChunkUnits holds the keys that the first unit sees and unit 15 - b sees
// last.
constexpr int kLaterBin = kChunkUnits;  // keys that the first unit does not see
constexpr int kBins = kChunkUnits + 1;
// Lists of at most this many keys are put in order in shared memory, longer ones in global memory.
constexpr std::int32_t kStagedKeys = 5120;

// Listed keys by index, and what units_of_keys says of each; and what it says of each in the order of the plan.
struct Staging {
  std::int32_t* keys;
  std::uint32_t* units;
  std::uint32_t* ordered_units;
  // ListOrder::kUnits: the same again, for sorting, and how many keys are listed by index, of all chunks.
  std::int32_t* other_keys = nullptr;
  std::uint32_t* other_units = nullptr;
  std::int32_t* counts = nullptr;
};
constexpr std::size_t kStagedBytes = kStagedKeys * (sizeof(std::int32_t) + 2 * sizeof(std::uint32_t));

__device__ inline int bin_of(std::uint32_t units) {
  return (units & 1) != 0 ? __clz(units & kAnyUnit) - (32 - kChunkUnits) : kLaterBin;
}

// The sum of the values of this lane and those before it.
__device__ inline std::int32_t inclusive_sum(std::int32_t value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const std::int32_t before = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value += before;
  }
  return value;
}

struct SharedCounts {
  std::int32_t listed[2][kPlanWarps];  // keys that a warp found, in rounds of even and odd number
  std::int32_t lowest[kPlanWarps], highest[kPlanWarps];
  std::int32_t bins[kPlanWarps][kBins];  // a warp's keys of a bin, then where its next key of the bin stands
  std::int32_t totals[kBins];
  std::int32_t unit_tiles[kChunkUnits];
};

struct Found {
  std::int32_t count = 0;  // keys that some unit sees
  std::int32_t lowest = INT32_MAX, highest = -1;
};

// Finds all keys that some unit of the chunk sees and, if makes_list(of these), writes the first `capacity` of them by
// index. Every warp takes up to 32 neighbouring words of 32 keys a round; lane u keeps the word that says which keys of
// the u-th are listed. Those of the last round, for most problems the only one, are not written before all are found.
template <typename MakesList>
__device__ inline Found find_keys(const ChunkRules& rules, std::int32_t capacity, std::int32_t* listed,
                                  SharedCounts& shared, MakesList makes_list) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::int32_t words = (rules.limit - 1) / 32 + 1;  // limit > 0
  const std::int32_t warp_words = min(32, (words - 1) / kPlanWarps + 1);
  const bool intervals_only = rules.begin != nullptr && rules.begin_stride == 1 && rules.end_stride == 1 &&
                              rules.key_mask == nullptr && rules.packed == nullptr;
  Found found;
  std::int32_t lowest = INT32_MAX, highest = -1;
  std::uint32_t word = 0;
  std::int32_t first_key = 0, position = 0;  // of the word
  const auto write = [&] {
    for (; word != 0 && position < capacity; word &= word - 1) listed[position++] = first_key + __ffs(word) - 1;
  };
  for (std::int32_t round = 0; round * kPlanWarps < (words - 1) / warp_words + 1; ++round) {
    const std::int32_t first_word = (round * kPlanWarps + warp) * warp_words;
    write();
    word = 0;
    if (first_word < words) {
      for (std::int32_t u = 0; u < warp_words; u += kScanKeys) {
        bool visible[kScanKeys];
        if (intervals_only && (first_word + u + kScanKeys) * 32 <= rules.limit) {
          intervals_show(rules, (first_word + u) * 32 + lane, visible);
        } else {
#pragma unroll
          for (int part = 0; part < kScanKeys; part += kListKeys) {
            std::int32_t keys[kListKeys];
            std::uint32_t units[kListKeys];
#pragma unroll
            for (int k = 0; k < kListKeys; ++k) keys[k] = min(first_word + u + part + k, words) * 32 + lane;
            units_of_keys(rules, keys, units);
#pragma unroll
            for (int k = 0; k < kListKeys; ++k) visible[part + k] = units[k] != 0;
          }
        }
#pragma unroll
        for (int k = 0; k < kScanKeys; ++k) {
          const std::uint32_t ballot = __ballot_sync(~0u, visible[k]);
          if (lane == u + k) word = ballot;
        }
      }
    }
    if (lane >= warp_words) word = 0;  // the next warp's
    first_key = (first_word + lane) * 32;
    if (word != 0) {
      lowest = min(lowest, first_key + __ffs(word) - 1);
      highest = max(highest, first_key + 31 - __clz(word));
    }
    const std::int32_t up_to_lane = inclusive_sum(__popc(word));
    if (lane == 31) shared.listed[round % 2][warp] = up_to_lane;
    __syncthreads();
    const std::int32_t up_to_warp = inclusive_sum(lane < kPlanWarps ? shared.listed[round % 2][lane] : 0);
    const std::int32_t before_warp = warp == 0 ? 0 : __shfl_sync(~0u, up_to_warp, warp - 1);
    position = found.count + before_warp + up_to_lane - __popc(word);
    found.count += __shfl_sync(~0u, up_to_warp, 31);
  }
  lowest = __reduce_min_sync(~0u, lowest);
  highest = __reduce_max_sync(~0u, highest);
  if (lane == 0) shared.lowest[warp] = lowest, shared.highest[warp] = highest;
  __syncthreads();
  found.lowest = __reduce_min_sync(~0u, shared.lowest[min(lane, kPlanWarps - 1)]);
  found.highest = __reduce_max_sync(~0u, shared.highest[min(lane, kPlanWarps - 1)]);
  if (makes_list(found)) {
    write();
    __syncthreads();
  }
  return found;
}

// The keys that a warp takes in a pass of sorting: an equal share of neighbours.
struct Share {
  std::int32_t first, last;
};
__device__ inline Share share_of_warp(std::int32_t count) {
  const std::int32_t share = ((count - 1) / static_cast<std::int32_t>(blockDim.x) + 1) * 32;
  const std::int32_t first = min(static_cast<std::int32_t>(threadIdx.x / 32) * share, count);
  return {first, min(first + share, count)};
}

// Keys, and what units_of_keys says of each.
struct KeyUnits {
  std::int32_t* keys;
  std::uint32_t* units;
};

// Of a stable counting sort, by a warp for 32 keys that follow one another, a lane each: first it counts how many are
// in which of its `bins`; once these say where its next key of the bin goes, it looks up where each goes. Lanes with
// bin `end` have no key.
__device__ inline void count_in_bins(std::int32_t* bins, int bin, int end) {
  const int lane = threadIdx.x % 32;
  const std::uint32_t peers = __match_any_sync(~0u, bin);
  if (bin < end && __ffs(peers) - 1 == lane) bins[bin] += __popc(peers);
  __syncwarp();
}
__device__ inline std::int32_t place_in_bin(std::int32_t* bins, int bin, int end) {
  const int lane = threadIdx.x % 32;
  const std::uint32_t peers = __match_any_sync(~0u, bin);
  const int rank = __popc(peers & ((1u << lane) - 1));
  const std::int32_t place = bin < end ? bins[bin] + rank : 0;
  __syncwarp();
  if (bin < end && rank == 0) bins[bin] += __popc(peers);
  __syncwarp();
  return place;
}

// The second half of order_by_first_unit: every warp has counted which of its keys are in which bin, and all threads
// are past a barrier.
__device__ inline void place_keys(std::int32_t count, const KeyUnits& from, const KeyUnits& to, SharedCounts& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto [first, last] = share_of_warp(count);
  std::int32_t* bins = shared.bins[warp];
  for (int bin = warp; bin < kBins; bin += kPlanWarps) {  // where each warp's keys of the bin start inside it
    const std::int32_t keys = lane < kPlanWarps ? shared.bins[lane][bin] : 0, up_to_lane = inclusive_sum(keys);
    if (lane < kPlanWarps) shared.bins[lane][bin] = up_to_lane - keys;
    if (lane == 31) shared.totals[bin] = up_to_lane;
  }
  __syncthreads();
  const std::int32_t total = lane < kBins ? shared.totals[lane] : 0;
  const std::int32_t bin_start = inclusive_sum(total) - total;
  if (lane < kBins) bins[lane] += bin_start;
  __syncwarp();
  for (std::int32_t base = first; base < last; base += 32) {
    const std::int32_t listed = base + lane;
    const bool active = listed < last;
    const std::uint32_t units = active ? from.units[listed] : 0;
    const std::int32_t place = place_in_bin(bins, active ? bin_of(units) : kBins, kBins);
    if (active) {
      to.keys[place] = from.keys[listed];
      to.units[place] = units;
    }
  }
}

// -1 behind `count` ordered keys, up to a multiple of two tiles.
__device__ inline void pad_keys(std::int32_t count, std::int32_t* ordered_keys) {
  constexpr std::int32_t kPadding = 2 * kPlanTileKeys;
  const std::int32_t padded = ((count - 1) / kPadding + 1) * kPadding;
  for (std::int32_t position = count + static_cast<std::int32_t>(threadIdx.x); position < padded;
       position += static_cast<std::int32_t>(blockDim.x)) {
    ordered_keys[position] = -1;
  }
}

// Puts `count` keys, listed by index, in the order ListOrder::kFirstUnit: a stable counting sort of one pass.
__device__ inline void order_by_first_unit(const ChunkRules& rules, std::int32_t count, const Staging& staging,
                                           std::int32_t* ordered_keys, SharedCounts& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto [first, last] = share_of_warp(count);
  std::int32_t* bins = shared.bins[warp];
  if (lane < kBins) bins[lane] = 0;
  __syncwarp();
  for (std::int32_t base = first; base < last; base += 32 * kListKeys) {
    std::int32_t keys[kListKeys];
    std::uint32_t units[kListKeys];
#pragma unroll
    for (int k = 0; k < kListKeys; ++k) {
      const std::int32_t listed = base + k * 32 + lane;
      keys[k] = listed < last ? staging.keys[listed] : -1;
    }
    units_of_keys(rules, keys, units);
#pragma unroll
    for (int k = 0; k < kListKeys; ++k) {
      const std::int32_t listed = base + k * 32 + lane;
      if (listed < last) staging.units[listed] = units[k];
      count_in_bins(bins, listed < last ? bin_of(units[k]) : kBins, kBins);
    }
  }
  __syncthreads();
  place_keys(count, {staging.keys, staging.units}, {ordered_keys, staging.ordered_units}, shared);
  pad_keys(count, ordered_keys);
}

}  // namespace flash_dmattn::internal::cuda
