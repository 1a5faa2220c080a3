#include "cuda/plan/make_plan.h"

#include <algorithm>

#include "core/arena.h"
#include "cuda/launch_blocks.cuh"
#include "cuda/plan/chunk_rules.cuh"
#include "cuda/plan/key_lists.cuh"
#include "cuda/plan/unit_lists.cuh"
#include "cuda/plan/visibility.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/dynamic_shared.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

// The arrays of a plan, and memory that making it takes.
struct PlanArrays {
  ChunkKeys* chunks;
  std::int32_t* keys;
  std::uint16_t *tile_units, *tile_full;
  std::int32_t* unit_tiles;
  Staging staging;  // of all chunks; null where shared memory takes its place
};

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
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const std::int32_t used = (count - 1) / kPlanTileKeys + 1;
  for (std::int32_t tile = warp; tile < used; tile += warps) {
    std::uint32_t any = 0, all = ~0u;
#pragma unroll
    for (int half = 0; half < kPlanTileKeys / 32; ++half) {
      const std::int32_t position = tile * kPlanTileKeys + half * 32 + lane;
      const std::uint32_t units = position < count ? ordered_units[position] : 0;
      any |= units, all &= units;
    }
    any = __reduce_or_sync(~0u, any);
    all = __reduce_and_sync(~0u, all);
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
      any = __reduce_or_sync(~0u, any);
      all = __reduce_and_sync(~0u, all);
      if (base + t < used) tiles.write(base + t, any, all);
    }
  }
  return used;
}

// One block a (plan batch, plan head, chunk); the last chunks, which see most keys under the causal rule, start first.
template <bool kStaged>
__global__ __launch_bounds__(kPlanThreads,
                             kPlanBlocks) void make_plan_kernel(const Visibility visibility, const PlanShape shape,
                                                                const std::uint32_t plans, const PlanArrays arrays) {
  __shared__ SharedCounts s_counts;

  begin_dependent_kernel();
  const std::int32_t chunk = shape.chunk_count - 1 - static_cast<std::int32_t>(blockIdx.x / plans);
  const std::uint32_t plan = blockIdx.x % plans, plan_heads = static_cast<std::uint32_t>(shape.plan_heads);
  const std::int64_t entry = static_cast<std::int64_t>(plan) * shape.chunk_count + chunk;
  const ChunkRules rules = chunk_rules(visibility, static_cast<std::int32_t>(plan / plan_heads),
                                       static_cast<std::int32_t>(plan % plan_heads * shape.head_divisor), chunk);
  const Tiles tiles = {arrays.tile_units + entry * shape.tiles, arrays.tile_full + entry * shape.tiles,
                       s_counts.unit_tiles};
  Staging staging;
  if constexpr (kStaged) {
    auto* s_staged = dynamic_shared<std::uint32_t>();  // kStagedBytes
    staging = {reinterpret_cast<std::int32_t*>(s_staged), s_staged + kStagedKeys, s_staged + 2 * kStagedKeys};
  } else {
    const std::int64_t offset = entry * shape.capacity;
    staging = {arrays.staging.keys + offset, arrays.staging.units + offset, arrays.staging.ordered_units + offset};
  }

  if (threadIdx.x < kChunkUnits) s_counts.unit_tiles[threadIdx.x] = 0;
  __syncthreads();
  // A chunk with few of the keys of its span is a list, if these fit. With kUnits list_by_units_kernel decides.
  const auto makes_list = [&](const Found& found) {
    const std::int64_t span = std::int64_t{found.highest} - found.lowest + 1;
    return shape.order == ListOrder::kUnits ||
           (found.count <= shape.capacity &&
            kListShareDenominator * std::int64_t{found.count} <= kListShareNumerator * span);
  };
  Found found;
  if (rules.limit > 0) {
    if (rules.begin == nullptr && rules.key_mask == nullptr && rules.packed == nullptr) {
      found.count = rules.limit, found.lowest = 0, found.highest = rules.limit - 1;
    } else {
      found = find_keys(rules, shape.capacity, staging.keys, s_counts, makes_list);
    }
  }
  ChunkKeys result = {0, -1};
  std::int32_t used = 0;
  if (found.count > 0) {
    if (shape.order == ListOrder::kFirstUnit && makes_list(found)) {
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

// The same blocks, after those of make_plan_kernel in the order kUnits, which have listed keys by index and written
// ranges: makes a list of a chunk that has fewer tiles to visit then. Where one set of units gives way to another a
// list's tiles are visited by both (docs/cuda.md), which is not known before, and left out of account.
__global__ __launch_bounds__(kSortThreads) void list_by_units_kernel(const Visibility visibility, const PlanShape shape,
                                                                     const std::uint32_t plans,
                                                                     const PlanArrays arrays) {
  __shared__ SortCounts s_counts;
  __shared__ std::int32_t s_unit_tiles[kChunkUnits];

  begin_dependent_kernel();
  const std::int32_t chunk = shape.chunk_count - 1 - static_cast<std::int32_t>(blockIdx.x / plans);
  const std::uint32_t plan = blockIdx.x % plans, plan_heads = static_cast<std::uint32_t>(shape.plan_heads);
  const std::int64_t entry = static_cast<std::int64_t>(plan) * shape.chunk_count + chunk;
  const std::int64_t offset = entry * shape.capacity;
  const std::int32_t found = arrays.staging.counts[entry];
  if (found == 0 || found > shape.capacity) return;
  const ChunkRules rules = chunk_rules(visibility, static_cast<std::int32_t>(plan / plan_heads),
                                       static_cast<std::int32_t>(plan % plan_heads * shape.head_divisor), chunk);
  const KeyUnits ordered = {arrays.keys + offset, arrays.staging.ordered_units + offset};
  const KeyUnits listed = {arrays.staging.keys + offset, arrays.staging.units + offset};
  const KeyUnits other = {arrays.staging.other_keys + offset, arrays.staging.other_units + offset};
  const std::int64_t unit_keys = look_up_units(rules, found, listed.keys, listed, s_counts);
  std::int32_t* unit_tiles = arrays.unit_tiles + entry * kChunkUnits;
  std::int64_t range_tiles = 0;
  for (int unit = 0; unit < kChunkUnits; ++unit) range_tiles += unit_tiles[unit];
  if (3 * unit_keys > 2 * kPlanTileKeys * range_tiles) return;

  const std::int32_t range_used = (arrays.chunks[entry].count - 1) / kPlanTileKeys + 1;
  if (threadIdx.x < kChunkUnits) s_unit_tiles[threadIdx.x] = 0;
  const std::int32_t count = order_by_units(found, shape.part_units, shape.capacity, ordered, listed, other, s_counts);
  pad_keys(count, ordered.keys);
  const Tiles tiles = {arrays.tile_units + entry * shape.tiles, arrays.tile_full + entry * shape.tiles, s_unit_tiles};
  const std::int32_t used = write_list_tiles(count, ordered.units, tiles);
  for (std::int32_t tile = used + static_cast<std::int32_t>(threadIdx.x); tile < range_used; tile += kSortThreads) {
    tiles.units[tile] = tiles.full[tile] = 0;
  }
  __syncthreads();
  if (threadIdx.x < kChunkUnits) unit_tiles[threadIdx.x] = s_unit_tiles[threadIdx.x];
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
  Staging staging = {arena.take<std::int32_t>(keys), arena.take<std::uint32_t>(keys), arena.take<std::uint32_t>(keys)};
  if (shape.order == ListOrder::kFirstUnit) return staging;
  staging.other_keys = arena.take<std::int32_t>(keys);
  staging.other_units = arena.take<std::uint32_t>(keys);
  staging.counts = arena.take<std::int32_t>(chunks);
  return staging;
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
      if (keys.first < 0) sums.listed_keys += __popc(__ballot_sync(~0u, tile_keys[half] >= 0));
    }
    for (std::uint32_t units = plan.tile_units[entry * plan.tiles + tile]; units != 0; units &= units - 1) {
      const std::int32_t unit_row = first_row + (__ffs(units) - 1) * kUnitRows;
      std::uint32_t kept = 0;
      for (int half = 0; half < kPlanTileKeys / 32; ++half) {
        for (int row = 0; row < kUnitRows; row += kWordRows) {
          kept += __popc(visible_word(visibility, ranges[half], batch, head, tile_keys[half], unit_row + row));
        }
      }
      kept = __reduce_add_sync(~0u, kept);
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
    add(&counts->listed_keys, sums.listed_keys);
  }
  if (threadIdx.x == 0) add(keys.first >= 0 ? &counts->range_chunks : &counts->list_chunks, 1);
}

}  // namespace

PlanShape plan_shape(const Visibility& visibility, std::int64_t batch, std::int64_t heads, std::int64_t list_limit,
                     ListOrder order, int part_units) {
  const BroadcastView &begin = visibility.begin, &end = visibility.end, &key_mask = visibility.key_mask;
  const PackedMask& packed = visibility.packed;
  PlanShape shape;
  shape.head_divisor = std::max<std::int64_t>(
      1, std::min({heads_per_entry(begin.defined(), begin.head_stride, begin.head_divisor, heads),
                   heads_per_entry(end.defined(), end.head_stride, end.head_divisor, heads),
                   heads_per_entry(key_mask.defined(), key_mask.head_stride, key_mask.head_divisor, heads),
                   heads_per_entry(packed.defined(), packed.head_stride, packed.head_divisor, heads)}));
  shape.order = order;
  shape.part_units = part_units;
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
    // In parts of lists some places stay empty. INT32_MAX keys would round up past it.
    const std::int64_t copies = shape.copies(), spare = (copies - 1) * kTilePair;
    shape.capacity = static_cast<std::int32_t>(
        std::min(copies * (round_up(std::min(wanted, keys)) + spare), INT32_MAX / kTilePair * kTilePair));
    shape.tiles = std::max(shape.tiles, shape.capacity / kPlanTileKeys);
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
                      void* staging, DevicePlan* plan, cudaStream_t stream) {
  *plan = plan_at(shape, batch, memory);
  Arena arena(memory), staging_arena(staging);
  PlanArrays arrays = take_arrays(arena, shape, batch);
  arrays.staging = take_staging(staging_arena, shape, batch);
  const std::int64_t plans = std::min<std::int64_t>(batch, shape.per_batch ? batch : 1) * shape.plan_heads;
  if (plans * shape.chunk_count == 0) return cudaSuccess;
  const auto launch = [&](auto* kernel, std::size_t shared_bytes, int threads = kPlanThreads) {
    return launch_blocks(kernel, {plans * shape.chunk_count, threads, shared_bytes, true}, stream, visibility, shape,
                         static_cast<std::uint32_t>(plans), arrays);
  };
  if (shape.order == ListOrder::kUnits) {
    const cudaError_t error = launch(make_plan_kernel<false>, 0);
    return error != cudaSuccess ? error : launch(list_by_units_kernel, 0, kSortThreads);
  }
  return stages_in_shared(shape) ? launch(make_plan_kernel<true>, kStagedBytes) : launch(make_plan_kernel<false>, 0);
}

cudaError_t count_plan(const Visibility& visibility, const DevicePlan& plan, std::int64_t batch, std::int64_t heads,
                       PlanCounts* device_counts, cudaStream_t stream) {
  const cudaError_t error = cudaMemsetAsync(device_counts, 0, sizeof *device_counts, stream);
  if (error != cudaSuccess) return error;
  return launch_blocks(count_plan_kernel, {batch * heads * plan.chunk_count, kCountThreads}, stream, visibility, plan,
                       static_cast<std::uint32_t>(heads), device_counts);
}

}  // namespace flash_dmattn::internal::cuda
