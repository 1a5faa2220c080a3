#include "cuda/plan/make_plan.h"

#include <algorithm>

#include "core/arena.h"
#include "cuda/launch_blocks.cuh"
#include "cuda/plan/chunk_rules.cuh"
#include "cuda/plan/visibility.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/dynamic_shared.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kPlanWarps = 32;
constexpr int kPlanThreads = 32 * kPlanWarps;
constexpr int kScanKeys = 8;  // keys of a lane that are in flight together while all keys are looked at
constexpr int kListKeys = 4;  // the same while units are worked out
// The order of a list: bin b of the first kChunkUnits holds the keys that the first unit sees and unit 15 - b sees
// last.
constexpr int kLaterBin = kChunkUnits;  // keys that the first unit does not see
constexpr int kBins = kChunkUnits + 1;
// ListOrder::kUnits sorts by digits of so many bits.
constexpr int kDigitBits = 4;
static_assert(1 << kDigitBits <= kBins && kChunkUnits % (2 * kDigitBits) == 0);  // an even number of passes
// Lists of at most this many keys are put in order in shared memory, longer ones in global memory.
constexpr std::int32_t kStagedKeys = 5120;

// Listed keys by index, and what units_of_keys says of each; and what it says of each in the order of the plan.
struct Staging {
  std::int32_t* keys;
  std::uint32_t* units;
  std::uint32_t* ordered_units;
  std::int32_t* counts;  // ListOrder::kUnits: how many keys are listed; of all chunks
};
constexpr std::size_t kStagedBytes = kStagedKeys * (sizeof(std::int32_t) + 2 * sizeof(std::uint32_t));

struct PlanArrays {
  ChunkKeys* chunks;
  std::int32_t* keys;
  std::uint16_t *tile_units, *tile_full;
  std::int32_t* unit_tiles;
  Staging staging;  // of all chunks; null where shared memory takes its place
};

__device__ inline int bin_of(std::uint32_t units) {
  return (units & 1) != 0 ? __clz(units & kAnyUnit) - (32 - kChunkUnits) : kLaterBin;
}

// The sum of the values of this lane and those before it.
__device__ inline std::int32_t inclusive_sum(std::int32_t value) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const std::int32_t before = __shfl_up_sync(kAllLanes, value, distance);
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
  unsigned long long unit_keys;  // of every unit those that it sees, summed
};

struct Found {
  std::int32_t count = 0;  // keys that some unit sees
  std::int32_t lowest = INT32_MAX, highest = -1;
};

// Finds all keys that some unit of the chunk sees and writes the first `capacity` of them by index. Every warp takes up
// to 32 neighbouring words of 32 keys a round; lane u keeps the word that says which keys of the u-th are listed.
__device__ inline Found find_keys(const ChunkRules& rules, std::int32_t capacity, std::int32_t* listed,
                                  SharedCounts& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::int32_t words = (rules.limit - 1) / 32 + 1;  // limit > 0
  const std::int32_t warp_words = min(32, (words - 1) / kPlanWarps + 1);
  const bool intervals_only = rules.begin != nullptr && rules.begin_stride == 1 && rules.end_stride == 1 &&
                              rules.key_mask == nullptr && rules.packed == nullptr;
  Found found;
  std::int32_t lowest = INT32_MAX, highest = -1;
  for (std::int32_t round = 0; round * kPlanWarps < (words - 1) / warp_words + 1; ++round) {
    const std::int32_t first_word = (round * kPlanWarps + warp) * warp_words;
    std::uint32_t word = 0;
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
          const std::uint32_t ballot = __ballot_sync(kAllLanes, visible[k]);
          if (lane == u + k) word = ballot;
        }
      }
    }
    if (lane >= warp_words) word = 0;  // the next warp's
    const std::int32_t first_key = (first_word + lane) * 32;
    if (word != 0) {
      lowest = min(lowest, first_key + __ffs(word) - 1);
      highest = max(highest, first_key + 31 - __clz(word));
    }
    const std::int32_t up_to_lane = inclusive_sum(__popc(word));
    if (lane == 31) shared.listed[round % 2][warp] = up_to_lane;
    __syncthreads();
    const std::int32_t up_to_warp = inclusive_sum(shared.listed[round % 2][lane]);
    const std::int32_t before_warp = warp == 0 ? 0 : __shfl_sync(kAllLanes, up_to_warp, warp - 1);
    std::int32_t position = found.count + before_warp + up_to_lane - __popc(word);
    for (; word != 0 && position < capacity; word &= word - 1) listed[position++] = first_key + __ffs(word) - 1;
    found.count += __shfl_sync(kAllLanes, up_to_warp, 31);
  }
  lowest = __reduce_min_sync(kAllLanes, lowest);
  highest = __reduce_max_sync(kAllLanes, highest);
  if (lane == 0) shared.lowest[warp] = lowest, shared.highest[warp] = highest;
  __syncthreads();  // and what is listed can be read
  found.lowest = __reduce_min_sync(kAllLanes, shared.lowest[lane]);
  found.highest = __reduce_max_sync(kAllLanes, shared.highest[lane]);
  return found;
}

// The keys that a warp takes in a pass of sorting: an equal share of neighbours.
struct Share {
  std::int32_t first, last;
};
__device__ inline Share share_of_warp(std::int32_t count) {
  const std::int32_t share = ((count - 1) / kPlanThreads + 1) * 32;
  const std::int32_t first = min(static_cast<std::int32_t>(threadIdx.x / 32) * share, count);
  return {first, min(first + share, count)};
}

// Keys, and what units_of_keys says of each.
struct KeyUnits {
  std::int32_t* keys;
  std::uint32_t* units;
};

// The second half of a stable counting sort: every warp has counted in its row of shared.bins which of its keys are in
// which bin, and all threads are past a barrier.
template <typename BinOf>
__device__ inline void place_keys(std::int32_t count, const KeyUnits& from, const KeyUnits& to, BinOf bin_of_units,
                                  SharedCounts& shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto [first, last] = share_of_warp(count);
  std::int32_t* bins = shared.bins[warp];
  if (warp < kBins) {  // where each warp's keys of bin `warp` start inside the bin
    const std::int32_t keys = shared.bins[lane][warp], up_to_lane = inclusive_sum(keys);
    shared.bins[lane][warp] = up_to_lane - keys;
    if (lane == 31) shared.totals[warp] = up_to_lane;
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
    const int bin = active ? bin_of_units(units) : kBins;
    const std::uint32_t peers = __match_any_sync(kAllLanes, bin);
    const int rank = __popc(peers & ((1u << lane) - 1));
    const std::int32_t position = active ? bins[bin] + rank : 0;
    __syncwarp();
    if (active && rank == 0) bins[bin] += __popc(peers);
    __syncwarp();
    if (active) {
      to.keys[position] = from.keys[listed];
      to.units[position] = units;
    }
  }
}

// -1 behind `count` ordered keys, up to a multiple of two tiles.
__device__ inline void pad_keys(std::int32_t count, std::int32_t* ordered_keys) {
  constexpr std::int32_t kPadding = 2 * kPlanTileKeys;
  const std::int32_t padded = ((count - 1) / kPadding + 1) * kPadding;
  for (std::int32_t position = count + static_cast<std::int32_t>(threadIdx.x); position < padded;
       position += kPlanThreads) {
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
      const int bin = listed < last ? bin_of(units[k]) : kBins;
      const std::uint32_t peers = __match_any_sync(kAllLanes, bin);
      if (bin < kBins && __ffs(peers) - 1 == lane) bins[bin] += __popc(peers);
      __syncwarp();
    }
  }
  __syncthreads();
  place_keys(count, {staging.keys, staging.units}, {ordered_keys, staging.ordered_units}, bin_of, shared);
  pad_keys(count, ordered_keys);
}

// Where a set of units stands in the reflected binary Gray code, in which neighbours differ by one unit (Gray, US
// patent 2632058). The code's bits are the units with the bits of their numbers reversed: 15, 7, 11, 3, 13, ...
// Neighbouring units that see the same keys would cancel each other out where they are neighbouring bits.
__device__ inline std::uint32_t gray_rank(std::uint32_t units) {
  static_assert(kChunkUnits == 16);
  std::uint32_t rank = units & kAnyUnit;
  std::uint32_t swapped = (rank >> 7 ^ rank) & 0x00aa;  // units whose numbers differ by bits 0 and 3
  rank ^= swapped ^ swapped << 7;
  swapped = (rank >> 2 ^ rank) & 0x0c0c;  // by bits 1 and 2
  rank ^= swapped ^ swapped << 2;
#pragma unroll
  for (int distance = 1; distance < kChunkUnits; distance *= 2) rank ^= rank >> distance;
  return rank;
}

// The units of `count` keys, listed by index, into `listed`, and the keys there, too. Returns how many units see each
// key, summed over the keys, to all threads.
__device__ inline std::int64_t look_up_units(const ChunkRules& rules, std::int32_t count, const std::int32_t* keys,
                                             const KeyUnits& listed, SharedCounts& shared) {
  if (threadIdx.x == 0) shared.unit_keys = 0;
  __syncthreads();
  std::int32_t sum = 0;
  for (std::int32_t base = threadIdx.x; base < count; base += kPlanThreads * kListKeys) {
    std::int32_t batch[kListKeys];
    std::uint32_t units[kListKeys];
#pragma unroll
    for (int k = 0; k < kListKeys; ++k) {
      const std::int32_t position = base + k * kPlanThreads;
      batch[k] = position < count ? keys[position] : -1;
    }
    units_of_keys(rules, batch, units);
#pragma unroll
    for (int k = 0; k < kListKeys; ++k) {
      const std::int32_t position = base + k * kPlanThreads;
      if (position >= count) continue;
      listed.keys[position] = batch[k];
      listed.units[position] = units[k];
      sum += __popc(units[k] & kAnyUnit);
    }
  }
  atomicAdd(&shared.unit_keys, static_cast<unsigned long long>(sum));
  __syncthreads();
  return static_cast<std::int64_t>(shared.unit_keys);
}

// A pass of a stable sort of `count` keys by their Gray rank: by its digit from bit `shift` on.
__device__ inline void sort_by_digit(std::int32_t count, int shift, const KeyUnits& from, const KeyUnits& to,
                                     SharedCounts& shared) {
  const auto digit_of = [&](std::uint32_t units) {
    return static_cast<int>(gray_rank(units) >> shift & ((1u << kDigitBits) - 1));
  };
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto [first, last] = share_of_warp(count);
  std::int32_t* bins = shared.bins[warp];
  if (lane < kBins) bins[lane] = 0;
  __syncwarp();
  for (std::int32_t base = first; base < last; base += 32) {
    const std::int32_t listed = base + lane;
    const int bin = listed < last ? digit_of(from.units[listed]) : kBins;
    const std::uint32_t peers = __match_any_sync(kAllLanes, bin);
    if (bin < kBins && __ffs(peers) - 1 == lane) bins[bin] += __popc(peers);
    __syncwarp();
  }
  __syncthreads();
  place_keys(count, from, to, digit_of, shared);
  __syncthreads();
}

// Puts `count` keys, listed by index in `ordered`, in the order ListOrder::kUnits there; `other` has room for as many.
__device__ inline void order_by_units(std::int32_t count, const KeyUnits& ordered, const KeyUnits& other,
                                      SharedCounts& shared) {
#pragma unroll 1
  for (int shift = 0; shift < kChunkUnits; shift += 2 * kDigitBits) {
    sort_by_digit(count, shift, ordered, other, shared);
    sort_by_digit(count, shift + kDigitBits, other, ordered, shared);
  }
}

// Takes down which units see a tile of the chunk, and which see all of it.
struct Tiles {
  std::uint16_t *units, *full;

  std::int32_t* visits;  // (kChunkUnits) in shared memory: tiles that each unit sees

  // By all lanes of a warp.
  __device__ void write(std::int32_t tile, std::uint32_t any, std::uint32_t all) const {
    const int lane = threadIdx.x % 32;
    if (lane == 0) {
      units[tile] = static_cast<std::uint16_t>(any & kAnyUnit);
      full[tile] = static_cast<std::uint16_t>(all >> kChunkUnits);
    }
    if (((any & kAnyUnit) >> lane & 1) != 0) atomicAdd(&visits[lane], 1);
  }
};

// Writes the tiles of an ordered list of `count` keys; returns how many.
__device__ inline std::int32_t write_list_tiles(std::int32_t count, const std::uint32_t* ordered_units,
                                                const Tiles& tiles) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::int32_t used = (count - 1) / kPlanTileKeys + 1;
  for (std::int32_t tile = warp; tile < used; tile += kPlanWarps) {
    std::uint32_t any = 0, all = ~0u;
#pragma unroll
    for (int half = 0; half < kPlanTileKeys / 32; ++half) {
      const std::int32_t position = tile * kPlanTileKeys + half * 32 + lane;
      const std::uint32_t units = position < count ? ordered_units[position] : 0;
      any |= units, all &= units;
    }
    any = __reduce_or_sync(kAllLanes, any);
    all = __reduce_and_sync(kAllLanes, all);
    tiles.write(tile, any, all);
  }
  return used;
}

// As write_list_tiles, of the range of `count` keys from `first` on.
__device__ inline std::int32_t write_range_tiles(const ChunkRules& rules, std::int32_t first, std::int32_t count,
                                                 const Tiles& tiles) {
  constexpr int kTogether = 4, kHalves = kPlanTileKeys / 32;  // tiles that a warp looks at together
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const std::int32_t used = (count - 1) / kPlanTileKeys + 1;
  for (std::int32_t base = warp * kTogether; base < used; base += kPlanWarps * kTogether) {
    std::int32_t keys[kTogether * kHalves];
    std::uint32_t units[kTogether * kHalves];
#pragma unroll
    for (int k = 0; k < kTogether * kHalves; ++k) {
      keys[k] = base + k / kHalves < used ? first + base * kPlanTileKeys + k * 32 + lane : -1;
    }
    units_of_keys(rules, keys, units);
#pragma unroll
    for (int t = 0; t < kTogether; ++t) {
      std::uint32_t any = 0, all = ~0u;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) any |= units[t * kHalves + half], all &= units[t * kHalves + half];
      any = __reduce_or_sync(kAllLanes, any);
      all = __reduce_and_sync(kAllLanes, all);
      if (base + t < used) tiles.write(base + t, any, all);
    }
  }
  return used;
}

// One block a (plan batch, plan head, chunk); the last chunks, which see most keys under the causal rule, start first.
template <bool kStaged>
__global__ __launch_bounds__(kPlanThreads, 1) void make_plan_kernel(const Visibility visibility, const PlanShape shape,
                                                                    const std::uint32_t plans,
                                                                    const PlanArrays arrays) {
  __shared__ SharedCounts s_counts;

  begin_dependent_kernel();
  const std::int32_t chunk = shape.chunk_count - 1 - static_cast<std::int32_t>(blockIdx.x / plans);
  const std::uint32_t plan = blockIdx.x % plans, plan_heads = static_cast<std::uint32_t>(shape.plan_heads);
  const std::int64_t entry = static_cast<std::int64_t>(plan) * shape.chunk_count + chunk;
  const ChunkRules rules = chunk_rules(visibility, static_cast<std::int32_t>(plan / plan_heads),
                                       (plan % plan_heads) * shape.head_divisor, chunk);
  const Tiles tiles = {arrays.tile_units + entry * shape.tiles, arrays.tile_full + entry * shape.tiles,
                       s_counts.unit_tiles};
  Staging staging;
  if constexpr (kStaged) {
    auto* s_staged = dynamic_shared<std::uint32_t>();  // kStagedBytes
    staging = {reinterpret_cast<std::int32_t*>(s_staged), s_staged + kStagedKeys, s_staged + 2 * kStagedKeys, nullptr};
  } else {
    const std::int64_t offset = entry * shape.capacity;
    staging = {arrays.staging.keys + offset, arrays.staging.units + offset, arrays.staging.ordered_units + offset,
               nullptr};
  }

  if (threadIdx.x < kChunkUnits) s_counts.unit_tiles[threadIdx.x] = 0;
  __syncthreads();
  Found found;
  if (rules.limit > 0) {
    if (rules.begin == nullptr && rules.key_mask == nullptr && rules.packed == nullptr) {
      found.count = rules.limit, found.lowest = 0, found.highest = rules.limit - 1;
    } else {
      found = find_keys(rules, shape.capacity, staging.keys, s_counts);
    }
  }
  ChunkKeys result = {0, -1};
  std::int32_t used = 0;
  if (found.count > 0) {
    const std::int64_t span = std::int64_t{found.highest} - found.lowest + 1;
    if (shape.order == ListOrder::kFirstUnit && found.count <= shape.capacity &&
        kListShareDenominator * std::int64_t{found.count} <= kListShareNumerator * span) {
      result.count = found.count;
      order_by_first_unit(rules, found.count, staging, arrays.keys + entry * shape.capacity, s_counts);
      __syncthreads();
      used = write_list_tiles(found.count, staging.ordered_units, tiles);
    } else {
      result.first = found.lowest / kPlanTileKeys * kPlanTileKeys;
      result.count = found.highest + 1 - result.first;
      used = write_range_tiles(rules, result.first, result.count, tiles);
    }
  }
  if (threadIdx.x == 0) {
    arrays.chunks[entry] = result;
    if (arrays.staging.counts != nullptr) arrays.staging.counts[entry] = found.count;
  }
  for (std::int32_t tile = used + static_cast<std::int32_t>(threadIdx.x); tile < shape.tiles; tile += kPlanThreads) {
    tiles.units[tile] = tiles.full[tile] = 0;
  }
  __syncthreads();
  if (threadIdx.x < kChunkUnits) {
    arrays.unit_tiles[entry * kChunkUnits + threadIdx.x] = s_counts.unit_tiles[threadIdx.x];
  }
}

// The same blocks, after those of make_plan_kernel with ListOrder::kUnits, which have listed keys by index and written
// ranges: makes a list of a chunk that has fewer tiles to visit then. A list's units visit a third more tiles than
// their keys fill, or so, since tiles in which one set of units gives way to another are visited by both
// (docs/cuda.md).
__global__ __launch_bounds__(kPlanThreads,
                             1) void list_by_units_kernel(const Visibility visibility, const PlanShape shape,
                                                          const std::uint32_t plans, const PlanArrays arrays) {
  __shared__ SharedCounts s_counts;

  begin_dependent_kernel();
  const std::int32_t chunk = shape.chunk_count - 1 - static_cast<std::int32_t>(blockIdx.x / plans);
  const std::uint32_t plan = blockIdx.x % plans, plan_heads = static_cast<std::uint32_t>(shape.plan_heads);
  const std::int64_t entry = static_cast<std::int64_t>(plan) * shape.chunk_count + chunk;
  const std::int64_t offset = entry * shape.capacity;
  const std::int32_t count = arrays.staging.counts[entry];
  if (count == 0 || count > shape.capacity) return;
  const ChunkRules rules = chunk_rules(visibility, static_cast<std::int32_t>(plan / plan_heads),
                                       (plan % plan_heads) * shape.head_divisor, chunk);
  const KeyUnits ordered = {arrays.keys + offset, arrays.staging.ordered_units + offset};
  const KeyUnits other = {arrays.staging.keys + offset, arrays.staging.units + offset};
  const std::int64_t unit_keys = look_up_units(rules, count, other.keys, ordered, s_counts);
  std::int32_t* unit_tiles = arrays.unit_tiles + entry * kChunkUnits;
  std::int64_t range_tiles = 0;
  for (int unit = 0; unit < kChunkUnits; ++unit) range_tiles += unit_tiles[unit];
  if (3 * unit_keys > 2 * kPlanTileKeys * range_tiles) return;

  const std::int32_t range_used = (arrays.chunks[entry].count - 1) / kPlanTileKeys + 1;
  if (threadIdx.x < kChunkUnits) s_counts.unit_tiles[threadIdx.x] = 0;
  order_by_units(count, ordered, other, s_counts);
  pad_keys(count, ordered.keys);
  const Tiles tiles = {arrays.tile_units + entry * shape.tiles, arrays.tile_full + entry * shape.tiles,
                       s_counts.unit_tiles};
  const std::int32_t used = write_list_tiles(count, ordered.units, tiles);
  for (std::int32_t tile = used + static_cast<std::int32_t>(threadIdx.x); tile < range_used; tile += kPlanThreads) {
    tiles.units[tile] = tiles.full[tile] = 0;
  }
  __syncthreads();
  if (threadIdx.x < kChunkUnits) unit_tiles[threadIdx.x] = s_counts.unit_tiles[threadIdx.x];
  if (threadIdx.x == 0) arrays.chunks[entry] = {count, -1};
}

std::size_t count_chunks(const PlanShape& shape, std::int64_t batch) {
  return static_cast<std::size_t>((shape.per_batch ? batch : 1) * shape.plan_heads * shape.chunk_count);
}

// All arrays but those of the staging.
PlanArrays take_arrays(Arena& arena, const PlanShape& shape, std::int64_t batch) {
  const std::size_t chunks = count_chunks(shape, batch);
  PlanArrays arrays = {};
  arrays.chunks = arena.take<ChunkKeys>(chunks);
  arrays.keys = arena.take<std::int32_t>(chunks * static_cast<std::size_t>(shape.capacity));
  arrays.tile_units = arena.take<std::uint16_t>(chunks * static_cast<std::size_t>(shape.tiles));
  arrays.tile_full = arena.take<std::uint16_t>(chunks * static_cast<std::size_t>(shape.tiles));
  arrays.unit_tiles = arena.take<std::int32_t>(chunks * kChunkUnits);
  return arrays;
}

// Two kernels have nothing in common but global memory.
bool stages_in_shared(const PlanShape& shape) {
  return shape.order == ListOrder::kFirstUnit && shape.capacity <= kStagedKeys;
}

Staging take_staging(Arena& arena, const PlanShape& shape, std::int64_t batch) {
  if (stages_in_shared(shape)) return {};
  const std::size_t chunks = count_chunks(shape, batch), keys = chunks * static_cast<std::size_t>(shape.capacity);
  return {arena.take<std::int32_t>(keys), arena.take<std::uint32_t>(keys), arena.take<std::uint32_t>(keys),
          shape.order == ListOrder::kUnits ? arena.take<std::int32_t>(chunks) : nullptr};
}

// How many neighbouring query heads read the same entries of a view.
std::int64_t heads_per_entry(bool defined, std::int64_t head_stride, std::int64_t head_divisor, std::int64_t heads) {
  return !defined || head_stride == 0 ? heads : head_divisor;
}

constexpr int kCountThreads = 256;

// One block a (batch element, query head, chunk), its warps taking turns at the tiles.
__global__ __launch_bounds__(kCountThreads) void count_plan_kernel(const Visibility visibility, const DevicePlan plan,
                                                                   const std::uint32_t heads, PlanCounts* counts) {
  const auto chunk_count = static_cast<std::uint32_t>(plan.chunk_count);
  const auto chunk = static_cast<std::int32_t>(blockIdx.x % chunk_count);
  const auto head = static_cast<std::int32_t>(blockIdx.x / chunk_count % heads);
  const auto batch = static_cast<std::int32_t>(blockIdx.x / chunk_count / heads);
  const std::int64_t entry = plan.first_chunk(batch, head) + chunk;
  const ChunkKeys keys = plan.chunks[entry];
  const std::int32_t existing = key_count(visibility, batch), first_row = chunk * kChunkRows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  PlanCounts sums = {};  // of the warp, the same in every lane
  for (std::int32_t tile = warp; tile * kPlanTileKeys < keys.count; tile += kCountThreads / 32) {
    std::int32_t tile_keys[kPlanTileKeys / 32];
    RowRange ranges[kPlanTileKeys / 32];
    for (int half = 0; half < kPlanTileKeys / 32; ++half) {
      const std::int32_t position = tile * kPlanTileKeys + half * 32 + lane;
      tile_keys[half] = position >= keys.count ? -1
                        : keys.first >= 0      ? keys.first + position
                                               : plan.keys[entry * plan.capacity + position];
      ranges[half] = visible_rows(visibility, batch, head, existing, tile_keys[half]);
    }
    for (std::uint32_t units = plan.tile_units[entry * plan.tiles + tile]; units != 0; units &= units - 1) {
      const std::int32_t unit_row = first_row + (__ffs(units) - 1) * kUnitRows;
      std::uint32_t kept = 0;
      for (int half = 0; half < kPlanTileKeys / 32; ++half) {
        for (int row = 0; row < kUnitRows; row += kWordRows) {
          kept += __popc(visible_word(visibility, ranges[half], batch, head, tile_keys[half], unit_row + row));
        }
      }
      kept = __reduce_add_sync(kAllLanes, kept);
      const std::uint32_t computed = kPlanTileKeys * max(0, min(kUnitRows, visibility.rows - unit_row));
      sums.kept_scores += kept;
      sums.computed_scores += computed;
      sums.tiles_visited += 1;
      (kept == computed ? sums.tiles_full : sums.tiles_partial) += 1;
    }
  }
  const auto add = [](std::int64_t* total, std::int64_t value) {
    if (value != 0) atomicAdd(reinterpret_cast<unsigned long long*>(total), static_cast<unsigned long long>(value));
  };
  if (lane == 0) {
    add(&counts->kept_scores, sums.kept_scores);
    add(&counts->computed_scores, sums.computed_scores);
    add(&counts->tiles_visited, sums.tiles_visited);
    add(&counts->tiles_partial, sums.tiles_partial);
    add(&counts->tiles_full, sums.tiles_full);
  }
  if (threadIdx.x == 0) {
    add(keys.first >= 0 ? &counts->range_chunks : &counts->list_chunks, 1);
    if (keys.first < 0) add(&counts->listed_keys, keys.count);
  }
}

}  // namespace

PlanShape plan_shape(const Visibility& visibility, std::int64_t batch, std::int64_t heads, std::int64_t list_limit,
                     ListOrder order) {
  const BroadcastView &begin = visibility.begin, &end = visibility.end, &key_mask = visibility.key_mask;
  const PackedMask& packed = visibility.packed;
  PlanShape shape;
  shape.head_divisor = std::max<std::int64_t>(
      1, std::min({heads_per_entry(begin.defined(), begin.head_stride, begin.head_divisor, heads),
                   heads_per_entry(end.defined(), end.head_stride, end.head_divisor, heads),
                   heads_per_entry(key_mask.defined(), key_mask.head_stride, key_mask.head_divisor, heads),
                   heads_per_entry(packed.defined(), packed.head_stride, packed.head_divisor, heads)}));
  shape.order = order;
  shape.plan_heads = static_cast<std::int32_t>(heads / shape.head_divisor);
  // A stride of 0 stands for a dimension of size 1; views that are not defined have no strides.
  shape.per_batch =
      batch > 1 && ((visibility.seqlens != nullptr && visibility.seqlens_stride != 0) || begin.batch_stride != 0 ||
                    end.batch_stride != 0 || key_mask.batch_stride != 0 || packed.batch_stride != 0);
  constexpr std::int64_t kTilePair = 2 * kPlanTileKeys;
  const auto round_up = [](std::int64_t keys) { return (keys + kTilePair - 1) / kTilePair * kTilePair; };
  shape.chunk_count = static_cast<std::int32_t>((std::int64_t{visibility.rows} + kChunkRows - 1) / kChunkRows);
  shape.tiles = static_cast<std::int32_t>(round_up(visibility.keys) / kPlanTileKeys);
  if (begin.defined() || key_mask.defined() || packed.defined()) {
    const std::int64_t keys = visibility.keys;
    const std::int64_t wanted = list_limit > 0 ? list_limit : std::max<std::int64_t>(keys / 4, kLeastCapacity);
    // INT32_MAX keys would round up past it.
    shape.capacity =
        static_cast<std::int32_t>(std::min(round_up(std::min(wanted, keys)), INT32_MAX / kTilePair * kTilePair));
  }
  return shape;
}

std::size_t plan_bytes(const PlanShape& shape, std::int64_t batch) {
  Arena arena(nullptr);
  take_arrays(arena, shape, batch);
  return arena.used();
}

std::size_t staging_bytes(const PlanShape& shape, std::int64_t batch) {
  Arena arena(nullptr);
  take_staging(arena, shape, batch);
  return arena.used();
}

DevicePlan plan_at(const PlanShape& shape, std::int64_t batch, void* memory) {
  Arena arena(memory);
  const PlanArrays arrays = take_arrays(arena, shape, batch);
  DevicePlan plan;
  plan.chunks = arrays.chunks;
  plan.keys = arrays.keys;
  plan.tile_units = arrays.tile_units;
  plan.tile_full = arrays.tile_full;
  plan.unit_tiles = arrays.unit_tiles;
  plan.chunk_count = shape.chunk_count;
  plan.capacity = shape.capacity;
  plan.tiles = shape.tiles;
  plan.plan_heads = shape.plan_heads;
  plan.per_batch = shape.per_batch;
  plan.head_divisor = shape.head_divisor;
  return plan;
}

cudaError_t make_plan(const Visibility& visibility, const PlanShape& shape, std::int64_t batch, void* memory,
                      void* staging, bool is_dependent, DevicePlan* plan, cudaStream_t stream) {
  *plan = plan_at(shape, batch, memory);
  Arena arena(memory), staging_arena(staging);
  PlanArrays arrays = take_arrays(arena, shape, batch);
  arrays.staging = take_staging(staging_arena, shape, batch);
  const std::int64_t plans = std::min<std::int64_t>(batch, shape.per_batch ? batch : 1) * shape.plan_heads;
  if (plans * shape.chunk_count == 0) return cudaSuccess;
  const auto launch = [&](auto* kernel, std::size_t shared_bytes, bool follows) {
    return launch_blocks(kernel, {plans * shape.chunk_count, kPlanThreads, shared_bytes, follows}, stream, visibility,
                         shape, static_cast<std::uint32_t>(plans), arrays);
  };
  if (shape.order == ListOrder::kUnits) {
    const cudaError_t error = launch(make_plan_kernel<false>, 0, is_dependent);
    return error != cudaSuccess ? error : launch(list_by_units_kernel, 0, true);
  }
  return stages_in_shared(shape) ? launch(make_plan_kernel<true>, kStagedBytes, is_dependent)
                                 : launch(make_plan_kernel<false>, 0, is_dependent);
}

cudaError_t count_plan(const Visibility& visibility, const DevicePlan& plan, std::int64_t batch, std::int64_t heads,
                       PlanCounts* device_counts, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(device_counts, 0, sizeof *device_counts, stream);
  if (error != cudaSuccess) return error;
  return launch_blocks(count_plan_kernel, {batch * heads * plan.chunk_count, kCountThreads}, stream, visibility, plan,
                       static_cast<std::uint32_t>(heads), device_counts);
}

}  // namespace flash_dmattn::internal::cuda
