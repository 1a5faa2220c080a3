#include "cuda/attention/key_works.h"

#include <algorithm>
#include <climits>
#include <cstdint>
#include <type_traits>

#include "cuda/attention/block_order.cuh"
#include "cuda/attention/key_works.cuh"
#include "cuda/attention/row_walk.cuh"
#include "cuda/launch_blocks.cuh"
#include "cuda/ptx/dependent_launch.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kThreads = kMostOrderedBlocks;
// Where works of so many entries begin is kept in shared memory, too: else each work is found by a chain of reads, and
// by one block.
constexpr int kMostKeptEntries = 4096;
// Of tiles of keys that a launch may have, so many at least are a block's to describe: where rows choose for themselves
// one block took 240 us for 20,000 works.
constexpr std::int64_t kBlockTiles = 4096, kMostBlocks = 16;

// Tiles of an entry that are works: neighbours.
struct Tiles {
  int first, count;
};

template <int kTileKeys>
__device__ Tiles works_of(const BackwardParams& params, int entry) {
  const int lists = key_work_lists(params), list = entry % lists, head = entry / lists;
  const int batch = head / (params.key_heads * params.splits), shares = params.group / params.splits;
  const int first_head = head / params.splits % params.key_heads * params.group + head % params.splits * shares;
  const ChunkKeys* chunks = params.plan.chunks + params.plan.first_chunk(batch, first_head);
  if (list > 0) {
    const ChunkKeys keys = chunks[params.first_chunk + list - 1];
    return {0, keys.first < 0 ? (keys.count + kTileKeys - 1) / kTileKeys : 0};
  }
  // Of all keys those that chunks have as ranges, from the first to the last. If none lists any, nothing is added to
  // sums, and somebody has to store zeros for the others, too.
  bool lists_keys = false;
  int first = INT_MAX, end = 0;
#pragma unroll 8
  for (int chunk = 0; chunk < params.plan.chunk_count; ++chunk) {
    const ChunkKeys keys = chunks[chunk];
    if (keys.count == 0) continue;
    if (keys.first < 0) {
      lists_keys = true;
    } else {
      first = min(first, keys.first);
      end = max(end, keys.first + keys.count);
    }
  }
  if (!lists_keys) return {0, range_tiles<kTileKeys>(params)};
  if (end == 0 || !params.takes_ranges) return {0, 0};
  return {first / kTileKeys, (end + kTileKeys - 1) / kTileKeys - first / kTileKeys};
}

// Copies of params.works.starts and first_tiles, if the entries are few enough.
struct KeptEntries {
  std::int32_t starts[kMostKeptEntries], first_tiles[kMostKeptEntries];
};

// What a work is.
template <int kTileKeys>
__device__ KeyBlock block_of(const BackwardParams& params, const KeptEntries& kept, int work) {
  // The last entry that begins at the work or before has it, since an entry without works begins where the next one
  // does.
  const KeyWorks& works = params.works;
  int entry = 0, end = key_work_entries(params);
  const bool keeps = end <= kMostKeptEntries;
  const auto start_of = [&](int other) { return keeps ? kept.starts[other] : works.starts[other]; };
  while (end - entry > 1) {
    const int middle = (entry + end) / 2;
    (start_of(middle) <= work ? entry : end) = middle;
  }
  const int lists = key_work_lists(params), list = entry % lists;
  const int tile = (keeps ? kept.first_tiles[entry] : works.first_tiles[entry]) + work - start_of(entry);
  const int key_tiles = range_tiles<kTileKeys>(params), list_tiles = params.plan.capacity / kTileKeys;
  const int tiles = key_tiles + list_tiles * (lists - 1), first = list == 0 ? 0 : key_tiles + (list - 1) * list_tiles;
  return key_block<kTileKeys, true>(params, static_cast<unsigned>(entry / lists * tiles + first + tile));
}

// The sum of `own` of all threads before; `total`: of all threads.
__device__ int sum_before(int own, int* total) {
  __shared__ int warp_sums[kThreads / 32];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int sum = own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int lower = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += lower;
  }
  __syncthreads();
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int before = 0;
  *total = 0;
  for (int other = 0; other < kThreads / 32; ++other) {
    if (other < warp) before += warp_sums[other];
    *total += warp_sums[other];
  }
  return before + sum - own;
}

// Every block finds out where works begin. The first one writes that down, puts the last works in order and describes
// them; the others, if there are any, describe the works before.
template <int kTileKeys>
__global__ void __launch_bounds__(kThreads)
    list_key_works_kernel(const __grid_constant__ BackwardParams params, int most_ordered) {
  __shared__ KeptEntries kept;
  begin_dependent_kernel();
  const int entries = key_work_entries(params), thread = static_cast<int>(threadIdx.x);
  const int block = static_cast<int>(blockIdx.x), blocks = entries <= kMostKeptEntries ? gridDim.x : 1;
  if (block >= blocks) return;
  const KeyWorks& list = params.works;
  int works = 0;
  for (int first = 0; first < entries; first += kThreads) {
    const int entry = first + thread;
    const Tiles tiles = entry < entries ? works_of<kTileKeys>(params, entry) : Tiles{0, 0};
    int total;
    const int before = sum_before(tiles.count, &total);
    if (entry < entries) {
      if (block == 0) list.starts[entry] = works + before, list.first_tiles[entry] = tiles.first;
      if (entry < kMostKeptEntries) kept.starts[entry] = works + before, kept.first_tiles[entry] = tiles.first;
    }
    works += total;
  }
  if (block == 0 && thread == 0) list.starts[entries] = works, *list.taken = 0;
  __syncthreads();
  const int ordered = list.last == nullptr ? 0 : min(most_ordered, kMostOrderedBlocks);
  const int count = min(works, ordered), first_ordered = works - count;
  const bool describes_last = block == 0;
  if (describes_last && count > 0) {
    order_last_blocks(count, list.last, [&](int index, int lane, int lanes) {
      const KeyBlock last = block_of<kTileKeys>(params, kept, first_ordered + index);
      return RowWalk<kUnitRows, kTileKeys, true>::visits(params, last, lane, lanes);
    });
    __syncthreads();
  }
  const int others = blocks - 1, begin = !describes_last ? (block - 1) * kThreads : others > 0 ? first_ordered : 0;
  const int end = describes_last ? works : first_ordered, step = max(1, others) * kThreads;
  for (int place = begin + thread; place < end; place += describes_last ? kThreads : step) {
    const int work = place < first_ordered ? place : first_ordered + list.last[place - first_ordered];
    list.blocks[place] = block_of<kTileKeys>(params, kept, work);
  }
}

}  // namespace

cudaError_t list_key_works(const BackwardParams& params, int tile_keys, int most_ordered, cudaStream_t stream) {
  const auto launch = [&]<int kTileKeys>(std::integral_constant<int, kTileKeys>) {
    const std::int64_t blocks =
        std::clamp<std::int64_t>(key_blocks<kTileKeys, true>(params) / kBlockTiles, 1, kMostBlocks);
    const LaunchShape shape = {.blocks = blocks, .threads = kThreads, .is_dependent = true};
    return launch_blocks(list_key_works_kernel<kTileKeys>, shape, stream, params, most_ordered);
  };
  switch (tile_keys) {
    case 32:
      return launch(std::integral_constant<int, 32>());
    case 64:
      return launch(std::integral_constant<int, 64>());
    default:
      return launch(std::integral_constant<int, 128>());
  }
}

}  // namespace flash_dmattn::internal::cuda
