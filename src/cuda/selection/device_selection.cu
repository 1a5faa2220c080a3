#include "cuda/selection/device_selection.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "cuda/launch_blocks.cuh"
#include "cuda/selection/find_evictions.cuh"
#include "cuda/selection/layout.h"
#include "cuda/selection/merge_lists.cuh"
#include "cuda/selection/sort_chunks.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kBoundThreads = 1024;

// Bounds of rows, then of keys, (B, 2, documents + 1), as documents.h reads them: within what there is, and none less
// than those before it. A block each.
__global__ void __launch_bounds__(kBoundThreads)
    clamp_bounds(const __grid_constant__ SelectionProblem problem, std::int32_t* bounds) {
  __shared__ std::int32_t sHighest[kBoundThreads / kWarp];
  begin_dependent_kernel();
  const std::int64_t batch = blockIdx.x / 2, count = problem.documents + 1;
  const bool of_keys = blockIdx.x % 2 != 0;
  const DocumentBounds& given = of_keys ? problem.key_bounds : problem.row_bounds;
  const std::int64_t length = of_keys ? problem.keys : problem.rows;
  const std::int32_t* source = given.data + batch * given.batch_stride;
  std::int32_t* target = bounds + blockIdx.x * count;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  std::int32_t before = 0;  // the highest so far
  for (std::int64_t first = 0; first < count; first += kBoundThreads) {
    const std::int64_t at = first + threadIdx.x;
    std::int32_t highest = at < count ? source[at * given.stride] : 0;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const std::int32_t lower = __shfl_up_sync(kAllLanes, highest, distance);
      if (lane >= distance) highest = max(highest, lower);
    }
    if (lane == kWarp - 1) sHighest[warp] = highest;
    __syncthreads();
    std::int32_t of_all = before;
    for (int other = 0; other < kBoundThreads / kWarp; ++other) {
      if (other < warp) highest = max(highest, sHighest[other]);
      of_all = max(of_all, sHighest[other]);
    }
    highest = max(highest, before);
    if (at < count) target[at] = static_cast<std::int32_t>(min(static_cast<std::int64_t>(highest), length));
    before = of_all;
    __syncthreads();
  }
}

// A window that holds every key evicts none, and one that holds no key has none to evict.
bool evicts(const SelectionProblem& problem) { return problem.window > 0 && problem.window < problem.keys; }

// Launches kernel(params..., first_block) until all blocks of the shape are launched: a grid has no more than 2^31 - 1.
template <typename Kernel, typename... Params>
cudaError_t launch_all_blocks(Kernel* kernel, LaunchShape shape, cudaStream_t stream, const Params&... params) {
  constexpr std::int64_t kMostBlocks = std::numeric_limits<std::int32_t>::max();
  const std::int64_t blocks = shape.blocks;
  for (std::int64_t first = 0; first < blocks; first += kMostBlocks) {
    shape.blocks = std::min(blocks - first, kMostBlocks);
    const cudaError_t error = launch_blocks(kernel, shape, stream, params..., first);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// Whether a key's rank and index fit 32 bits, which take half the instructions of 64.
bool fits_32_bits(const SelectionProblem& problem) {
  return size_of(problem.dtype) == 2 && problem.keys <= std::int64_t{1} << kIndexBits<std::uint32_t>;
}

template <typename Key>
std::size_t list_bytes(const SelectionProblem& problem) {
  if (!evicts(problem)) return 0;
  const ListLayout layout(problem, kChunkKeys<Key>);
  return static_cast<std::size_t>(problem.batch * problem.heads * layout.head_keys) * sizeof(Key);
}

template <typename Format, typename Key, typename KeyArrivals = Arrivals>
cudaError_t enqueue(const SelectionProblem& problem, void* workspace, cudaStream_t stream) {
  const ListLayout layout(problem, kChunkKeys<Key>);
  const std::int64_t heads = problem.batch * problem.heads, chunks = heads * layout.chunks;
  auto* lists = evicts(problem) ? static_cast<Key*>(workspace) : nullptr;
  const auto launch = [&](auto* kernel, std::int64_t blocks, int threads, const auto&... params) {
    const LaunchShape shape = {.blocks = blocks, .threads = threads, .is_dependent = true};
    return launch_all_blocks(kernel, shape, stream, params...);
  };
  std::int32_t* bounds = nullptr;
  cudaError_t error = cudaSuccess;
  if (problem.is_packed()) {
    bounds = reinterpret_cast<std::int32_t*>(static_cast<std::byte*>(workspace) + list_bytes<Key>(problem));
    const LaunchShape shape = {.blocks = 2 * problem.batch, .threads = kBoundThreads, .is_dependent = true};
    error = launch_blocks(clamp_bounds, shape, stream, problem, bounds);
    if (error != cudaSuccess) return error;
  }
  error = launch(sort_chunks<Format, Key, KeyArrivals>, chunks, kChunkKeys<Key>, problem, layout,
                 static_cast<const std::int32_t*>(bounds), lists);
  if (lists == nullptr) return error;
  for (int level = 1; level < layout.levels && error == cudaSuccess; ++level) {
    const std::int64_t tiles = (layout.best_at(level) + kMergeTile<Key> - 1) / kMergeTile<Key>;
    error = launch(merge_lists<Key>, heads * layout.lists_at(level) * tiles, kMergeThreads, layout, lists, level);
  }
  if (error != cudaSuccess) return error;
  return launch(find_evictions<Key, KeyArrivals>, chunks, kEvictionThreads<Key>, problem, layout,
                static_cast<const std::int32_t*>(bounds), static_cast<const Key*>(lists));
}

// By what a key's score, index and, of packed documents, document take.
template <typename Format>
cudaError_t enqueue_scores(const SelectionProblem& problem, void* workspace, cudaStream_t stream) {
  if (problem.is_packed()) return enqueue<Format, Uint128, PackedArrivals>(problem, workspace, stream);
  if constexpr (sizeof(typename Format::Bits) == 8) {
    return enqueue<Format, Uint128>(problem, workspace, stream);
  } else {
    if constexpr (sizeof(typename Format::Bits) == 2) {
      if (fits_32_bits(problem)) return enqueue<Format, std::uint32_t>(problem, workspace, stream);
    }
    return enqueue<Format, std::uint64_t>(problem, workspace, stream);
  }
}

}  // namespace

std::size_t selection_workspace(const SelectionProblem& problem) {
  if (problem.is_packed()) {
    const auto bounds = static_cast<std::size_t>(2 * problem.batch * (problem.documents + 1));
    return list_bytes<Uint128>(problem) + bounds * sizeof(std::int32_t);
  }
  if (problem.dtype == DType::kFloat64) return list_bytes<Uint128>(problem);
  return fits_32_bits(problem) ? list_bytes<std::uint32_t>(problem) : list_bytes<std::uint64_t>(problem);
}

cudaError_t select_keys(const SelectionProblem& problem, void* workspace, cudaStream_t stream) {
  if (problem.batch * problem.heads * problem.keys == 0) return cudaSuccess;
  switch (problem.dtype) {
    case DType::kFloat16:
      return enqueue_scores<Float16Format>(problem, workspace, stream);
    case DType::kBFloat16:
      return enqueue_scores<BFloat16Format>(problem, workspace, stream);
    case DType::kFloat32:
      return enqueue_scores<Float32Format>(problem, workspace, stream);
    case DType::kFloat64:
      return enqueue_scores<Float64Format>(problem, workspace, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace flash_dmattn::internal::cuda
