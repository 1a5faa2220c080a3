// Lists of keys that every row chooses for itself (ListOrder::kUnits and kUnitsOnce): what blocks of
// list_by_units_kernel do.
#pragma once

#include <cstdint>

#include "cuda/plan/key_lists.cuh"

namespace flash_dmattn::internal::cuda {

// Of a block, of which a multiprocessor has one: a long chain of passes, for few chunks of rows.
constexpr int kSortWarps = 32, kSortThreads = 32 * kSortWarps;
// A pass of sorting knows so many bins.
constexpr int kSortBits = 8, kSortBins = 1 << kSortBits;
static_assert(2 * kSortBits == kChunkUnits && kSortBins <= kSortThreads);
// No tile of so many keys, as the backward may take, has a key twice.
constexpr std::int32_t kUniqueKeys = 2 * kPlanTileKeys;
static_assert(kUniqueKeys % 32 == 0);

struct SortCounts {
  std::int32_t bins[kSortWarps][kSortBins];  // a warp's keys of a bin, then where its next key of the bin stands
  std::int32_t totals[kSortBins / 32];       // of 32 bins
  std::int32_t parts[kChunkUnits];           // of bins that begin with a tile
  unsigned long long unit_keys;              // of every unit those that it sees, summed
};

// Where a set of up to 16 stands in the reflected binary Gray code, in which neighbours differ by one element (Gray, US
// patent 2632058).
__device__ inline std::uint32_t rank_of_set(std::uint32_t rank) {
#pragma unroll
  for (int distance = 1; distance < 16; distance *= 2) rank ^= rank >> distance;
  return rank;
}
// Of units the code's bits are these with the bits of their numbers reversed: of 16 units 15, 7, 11, 3, 13, ...
// Neighbouring units that see the same keys would cancel each other out where they are neighbouring bits.
__device__ inline std::uint32_t rank_of_units(std::uint32_t set) {
  static_assert(kChunkUnits == 16);
  set &= kAnyUnit;
  std::uint32_t swapped = (set >> 7 ^ set) & 0x00aa;  // units whose numbers differ by bits 0 and 3
  set ^= swapped ^ swapped << 7;
  swapped = (set >> 2 ^ set) & 0x0c0c;  // by bits 1 and 2
  set ^= swapped ^ swapped << 2;
  return rank_of_set(set);
}
// The same of fewer units: 8, 4 or 2.
__device__ inline std::uint32_t rank_of_units(std::uint32_t set, int units) {
  static_assert(kSortBits == 8);
  const std::uint32_t by_eight = (set >> 3 ^ set) & 0x0a;  // units whose numbers differ by bits 0 and 2
  const std::uint32_t by_four = (set >> 1 ^ set) & 0x02;   // by bits 0 and 1
  if (units == 8) set ^= by_eight ^ by_eight << 3;
  if (units == 4) set ^= by_four ^ by_four << 1;
  return rank_of_set(set);
}

// The units of `count` keys, listed by index, into `listed`, and the keys there, too. Returns how many units see each
// key, summed over the keys, to all threads.
__device__ inline std::int64_t look_up_units(const ChunkRules& rules, std::int32_t count, const std::int32_t* keys,
                                             const KeyUnits& listed, SortCounts& shared) {
  if (threadIdx.x == 0) shared.unit_keys = 0;
  __syncthreads();
  std::int32_t sum = 0;
  for (std::int32_t base = threadIdx.x; base < count; base += kSortThreads * kListKeys) {
    std::int32_t batch[kListKeys];
    std::uint32_t units[kListKeys];
#pragma unroll
    for (int k = 0; k < kListKeys; ++k) {
      const std::int32_t position = base + k * kSortThreads;
      batch[k] = position < count ? keys[position] : -1;
    }
    units_of_keys(rules, batch, units);
#pragma unroll
    for (int k = 0; k < kListKeys; ++k) {
      const std::int32_t position = base + k * kSortThreads;
      if (position >= count) continue;
      listed.keys[position] = batch[k];
      listed.units[position] = units[k];
      sum += __popc(units[k] & kAnyUnit);
    }
  }
  // A warp once: additions of 64 bits to shared memory are loops of comparing and swapping.
  sum = __reduce_add_sync(~0u, sum);
  if (threadIdx.x % 32 == 0) atomicAdd(&shared.unit_keys, static_cast<unsigned long long>(sum));
  __syncthreads();
  return static_cast<std::int64_t>(shared.unit_keys);
}

// Marks of keys whose tiles stay whole (mark_whole_tiles).
__device__ inline bool is_whole(std::int32_t key) { return key < 0; }
__device__ inline std::int32_t unmarked(std::int32_t key) { return key < 0 ? ~key : key; }

// Of neighbouring keys that the same set of units sees marks the first ones, as many as fill kUniqueKeys several times.
__device__ inline void mark_whole_tiles(std::int32_t count, const KeyUnits& sorted) {
  const int lane = threadIdx.x % 32;
  const auto [first, last] = share_of_warp(count);
  const auto set_of = [&](std::int32_t position) { return sorted.units[position] & kAnyUnit; };
  std::int32_t run = first;  // where the keys begin that see the same as the one looked at
  if (first < last) {
    // Equal sets are neighbours.
    const std::uint32_t set = set_of(first);
    for (std::int32_t before = -1; run - before > 1;) {
      const std::int32_t middle = before + (run - before) / 2;
      (set_of(middle) == set ? run : before) = middle;
    }
  }
  for (std::int32_t base = first; base < last; base += 32) {
    const std::int32_t position = base + lane;
    const bool exists = position < last;
    const std::uint32_t set = exists ? set_of(position) : 0;
    const bool begins = exists && position > 0 && set_of(position - 1) != set;
    const std::uint32_t beginnings = __ballot_sync(~0u, begins), up_to_lane = beginnings & ((2u << lane) - 1);
    const std::int32_t own_run = up_to_lane == 0 ? run : base + 31 - __clz(up_to_lane);
    const std::int32_t end = own_run + ((position - own_run) / kUniqueKeys + 1) * kUniqueKeys;
    if (exists && end <= count && set_of(end - 1) == set) sorted.keys[position] = ~sorted.keys[position];
    if (beginnings != 0) run = base + 31 - __clz(beginnings);
  }
  __syncthreads();
}

// A stable counting sort of `count` keys by bin_of(key, units); those of kSortBins are left out. What units see_in(bin)
// has not, is forgotten. kParts: bins, no more than a chunk has units, begin at multiples of kUniqueKeys. Returns where
// the last key stands, plus one, in `to`, where another pass may read them.
template <bool kParts = false, typename BinOf, typename SeeIn>
__device__ inline std::int32_t sort_by_bin(std::int32_t count, const KeyUnits& from, const KeyUnits& to,
                                           SortCounts& shared, BinOf bin_of, SeeIn see_in) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto [first, last] = share_of_warp(count);
  std::int32_t* bins = shared.bins[warp];
  for (int bin = lane; bin < kSortBins; bin += 32) bins[bin] = 0;
  __syncwarp();
  // Several keys of a lane are on their way together; lane by lane they then come in order.
  const auto for_each_key = [&, first = first, last = last](auto visit) {
    for (std::int32_t base = first; base < last; base += 32 * kListKeys) {
      std::int32_t keys[kListKeys];
      std::uint32_t units[kListKeys];
#pragma unroll
      for (int k = 0; k < kListKeys; ++k) {
        const std::int32_t position = base + k * 32 + lane;
        keys[k] = position < last ? from.keys[position] : 0;
        units[k] = position < last ? from.units[position] : 0;
      }
#pragma unroll
      for (int k = 0; k < kListKeys; ++k) {
        const int bin = base + k * 32 + lane < last ? bin_of(keys[k], units[k]) : kSortBins;
        visit(keys[k], units[k], bin);
      }
    }
  };
  for_each_key([&](std::int32_t, std::uint32_t, int bin) { count_in_bins(bins, bin, kSortBins); });
  __syncthreads();
  std::int32_t total = 0;  // of the thread's bin
  const int own_bin = static_cast<int>(threadIdx.x);
  if (own_bin < kSortBins) {
    for (int other = 0; other < kSortWarps; ++other) {
      const std::int32_t keys = shared.bins[other][own_bin];
      shared.bins[other][own_bin] = total;
      total += keys;
    }
  }
  std::int32_t start = 0, end = 0;
  if constexpr (kParts) {
    if (own_bin < kChunkUnits) shared.parts[own_bin] = total;
    __syncthreads();
    for (int bin = 0; bin < kChunkUnits; ++bin) {
      const std::int32_t keys = shared.parts[bin];
      if (keys == 0) continue;
      end = (end + kUniqueKeys - 1) / kUniqueKeys * kUniqueKeys;
      if (bin == own_bin) start = end;
      end += keys;
    }
  } else {
    const std::int32_t up_to_lane = inclusive_sum(total);
    if (own_bin < kSortBins && lane == 31) shared.totals[warp] = up_to_lane;
    __syncthreads();
    start = up_to_lane - total;
    for (int other = 0; other < kSortBins / 32; ++other) {
      if (other < warp) start += shared.totals[other];
      end += shared.totals[other];
    }
  }
  if (own_bin < kSortBins) {
    for (int other = 0; other < kSortWarps; ++other) shared.bins[other][own_bin] += start;
  }
  __syncthreads();
  for_each_key([&](std::int32_t key, std::uint32_t units, int bin) {
    const std::int32_t place = place_in_bin(bins, bin, kSortBins);
    if (bin == kSortBins) return;
    to.keys[place] = unmarked(key);
    to.units[place] = units & see_in(bin);
  });
  __syncthreads();
  return end;
}

// A part of a chunk's units: so many neighbours, which a list's part is for.
struct UnitPart {
  int units;
  __device__ int number(std::uint32_t set) const { return (__ffs(static_cast<int>(set & kAnyUnit)) - 1) / units; }
  // Bits of its units, of a set of those that see a key and of those whose rows all do.
  __device__ std::uint32_t bits(int number) const {
    const std::uint32_t some = ((1u << units) - 1) << (number * units);
    return some | some << kChunkUnits;
  }
};

// ListOrder::kUnits: puts `count` keys, listed by index in `from`, in order in `ordered`, with the units that see them
// there. A list begins with a part for all units; while parts have more than `part_units` of these, keys that a set of
// them sees stay where they fill kUniqueKeys, and the others go on to the parts of half as many units whose units see
// them, or stay where `capacity`, of each of the three, might not suffice. Returns the length of the list, in which -1
// stands where nothing does.
__device__ inline std::int32_t order_by_units(std::int32_t count, int part_units, std::int32_t capacity,
                                              const KeyUnits& ordered, KeyUnits from, KeyUnits to, SortCounts& shared) {
  const auto all = [](int) { return ~0u; };
  // Any number of a set brings equal ones together. Its rank says where it stands, if all stay in one part.
  const auto rank_digit = [&](int shift) {
    return [=](std::int32_t, std::uint32_t units) {
      const std::uint32_t rank = part_units == kChunkUnits ? rank_of_units(units) : units;
      return static_cast<int>(rank >> shift & (kSortBins - 1));
    };
  };
  sort_by_bin(count, from, to, shared, rank_digit(0), all);
  sort_by_bin(count, to, from, shared, rank_digit(kSortBits), all);
  UnitPart part = {kChunkUnits};
  std::int32_t whole = 0;  // keys that have stayed
#pragma unroll 1
  while (part.units > part_units) {
    const int parts = kChunkUnits / part.units, half = part.units / 2;
    if (whole + 2 * (std::int64_t{count} + parts * kUniqueKeys) > capacity) break;
    mark_whole_tiles(count, from);
    whole += sort_by_bin(
        count, from, {ordered.keys + whole, ordered.units + whole}, shared,
        [](std::int32_t key, std::uint32_t) { return is_whole(key) ? 0 : kSortBins; }, all);
    std::int32_t left = 0;
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {
      left += sort_by_bin(
          count, from, {to.keys + left, to.units + left}, shared,
          [&](std::int32_t key, std::uint32_t units) {
            const int number = part.number(units);
            const std::uint32_t set = units >> ((2 * number + side) * half) & ((1u << half) - 1);
            return set == 0 || is_whole(key) ? kSortBins : static_cast<int>(number << half | rank_of_units(set, half));
          },
          [&](int bin) { return UnitPart{half}.bits(2 * (bin >> half) + side); });
    }
    const KeyUnits other = from;
    from = to, to = other, count = left, part.units = half;
  }
  const std::int32_t padded = whole + count + kChunkUnits / part.units * kUniqueKeys;
  for (std::int32_t position = whole + static_cast<std::int32_t>(threadIdx.x); position < min(padded, capacity);
       position += kSortThreads) {
    ordered.keys[position] = -1, ordered.units[position] = 0;
  }
  __syncthreads();
  return whole + sort_by_bin<true>(
                     count, from, {ordered.keys + whole, ordered.units + whole}, shared,
                     [&](std::int32_t, std::uint32_t units) { return part.number(units); }, all);
}

}  // namespace flash_dmattn::internal::cuda
