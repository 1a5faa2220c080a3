#include "cuda/attention/key_works.h"

#include "cuda/attention/block_order.cuh"
#include "cuda/attention/key_works.cuh"
#include "cuda/attention/row_walk.cuh"
#include "cuda/launch_blocks.cuh"
#include "cuda/ptx/dependent_launch.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kThreads = kMostOrderedBlocks;

// Works of an entry.
template <int kTileKeys>
__device__ int works_of(const BackwardParams& params, int entry) {
  const int lists = key_work_lists(params), list = entry % lists, head = entry / lists;
  const int batch = head / (params.key_heads * params.splits), shares = params.group / params.splits;
  const int first_head = head / params.splits % params.key_heads * params.group + head % params.splits * shares;
  const ChunkKeys* chunks = params.plan.chunks + params.plan.first_chunk(batch, first_head);
  if (list > 0) {
    const ChunkKeys keys = chunks[params.first_chunk + list - 1];
    return keys.first < 0 ? (keys.count + kTileKeys - 1) / kTileKeys : 0;
  }
  // Of all keys, if a chunk has them as a range. If none lists any, either, nothing is added to sums, and somebody has
  // to store zeros.
  bool has_range = false, lists_keys = false;
  for (int chunk = 0; chunk < params.plan.chunk_count; ++chunk) {
    has_range |= chunks[chunk].first >= 0;
    lists_keys |= chunks[chunk].first < 0 && chunks[chunk].count > 0;
  }
  return has_range || !lists_keys ? range_tiles<kTileKeys>(params) : 0;
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

// By one block.
template <int kTileKeys>
__global__ void __launch_bounds__(kThreads) list_key_works_kernel(const __grid_constant__ BackwardParams params) {
  begin_dependent_kernel();
  const int entries = key_work_entries(params), thread = static_cast<int>(threadIdx.x);
  const KeyWorks& list = params.works;
  int works = 0;
  for (int first = 0; first < entries; first += kThreads) {
    const int entry = first + thread;
    int total;
    const int before = sum_before(entry < entries ? works_of<kTileKeys>(params, entry) : 0, &total);
    if (entry < entries) list.starts[entry] = works + before;
    works += total;
  }
  if (thread == 0) list.starts[entries] = works, *list.taken = 0;
  const int count = ordered_works(params, works);
  if (count == 0) return;
  __syncthreads();
  order_last_blocks(count, list.last, [&](int index, int lane, int lanes) {
    const auto number = static_cast<unsigned>(number_of_work<kTileKeys, 1>(params, works - count + index));
    return RowWalk<kUnitRows, kTileKeys, true>::visits(params, key_block<kTileKeys, true>(params, number), lane, lanes);
  });
}

}  // namespace

cudaError_t list_key_works(const BackwardParams& params, int tile_keys, cudaStream_t stream) {
  const LaunchShape shape = {.blocks = 1, .threads = kThreads, .is_dependent = true};
  return tile_keys == 64 ? launch_blocks(list_key_works_kernel<64>, shape, stream, params)
                         : launch_blocks(list_key_works_kernel<128>, shape, stream, params);
}

}  // namespace flash_dmattn::internal::cuda
