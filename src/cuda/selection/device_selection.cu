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
  const auto launch = [&](auto* kernel, std::int64_t blocks, int threads, bool is_dependent, const auto&... params) {
    const LaunchShape shape = {.blocks = blocks, .threads = threads, .is_dependent = is_dependent};
    return launch_all_blocks(kernel, shape, stream, params...);
  };
  std::int32_t* bounds = nullptr;
  cudaError_t error = cudaSuccess;
  if (problem.is_packed()) {
    bounds = reinterpret_cast<std::int32_t*>(static_cast<std::byte*>(workspace) + list_bytes<Key>(problem));
    const LaunchShape shape = {.blocks = 2 * problem.batch, .threads = kBoundThreads};
    error = launch_blocks(clamp_bounds, shape, stream, problem, bounds);
    if (error != cudaSuccess) return error;
  }
  error = launch(sort_chunks<Format, Key, KeyArrivals>, chunks, kChunkKeys<Key>, problem.is_packed(), problem, layout,
                 static_cast<const std::int32_t*>(bounds), lists);
  if (lists == nullptr) return error;
  for (int level = 1; level < layout.levels && error == cudaSuccess; ++level) {
    const std::int64_t tiles = (layout.best_at(level) + kMergeTile<Key> - 1) / kMergeTile<Key>;
    error = launch(merge_lists<Key>, heads * layout.lists_at(level) * tiles, kMergeThreads, true, layout, lists, level);
  }
  if (error != cudaSuccess) return error;
  return launch(find_evictions<Key, KeyArrivals>, chunks, kEvictionThreads<Key>, true, problem, layout,
                static_cast<const std::int32_t*>(bounds), static_cast<const Key*>(lists));
}

template <typename Format>
cudaError_t enqueue_16_bit_scores(const SelectionProblem& problem, void* workspace, cudaStream_t stream) {
  const auto enqueue_as = fits_32_bits(problem) ? enqueue<Format, std::uint32_t> : enqueue<Format, std::uint64_t>;
  return enqueue_as(problem, workspace, stream);
}

// Of all documents at once, whose numbers are above the ranks.
cudaError_t select_packed(const SelectionProblem& problem, void* workspace, cudaStream_t stream) {
  switch (problem.dtype) {
    case DType::kFloat16:
      return enqueue<Float16Format, Uint128, PackedArrivals>(problem, workspace, stream);
    case DType::kBFloat16:
      return enqueue<BFloat16Format, Uint128, PackedArrivals>(problem, workspace, stream);
    case DType::kFloat32:
      return enqueue<Float32Format, Uint128, PackedArrivals>(problem, workspace, stream);
    case DType::kFloat64:
      return enqueue<Float64Format, Uint128, PackedArrivals>(problem, workspace, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

std::size_t selection_workspace(const SelectionProblem& problem) {
  if (problem.is_packed()) {
    return list_bytes<Uint128>(problem) + static_cast<std::size_t>(bound_count(problem)) * sizeof(std::int32_t);
  }
  if (problem.dtype == DType::kFloat64) return list_bytes<Uint128>(problem);
  return fits_32_bits(problem) ? list_bytes<std::uint32_t>(problem) : list_bytes<std::uint64_t>(problem);
}

cudaError_t select_keys(const SelectionProblem& problem, void* workspace, cudaStream_t stream) {
  if (problem.batch * problem.heads * problem.keys == 0) return cudaSuccess;
  if (problem.is_packed()) return select_packed(problem, workspace, stream);
  switch (problem.dtype) {
    case DType::kFloat16:
      return enqueue_16_bit_scores<Float16Format>(problem, workspace, stream);
    case DType::kBFloat16:
      return enqueue_16_bit_scores<BFloat16Format>(problem, workspace, stream);
    case DType::kFloat32:
      return enqueue<Float32Format, std::uint64_t>(problem, workspace, stream);
    case DType::kFloat64:
      return enqueue<Float64Format, Uint128>(problem, workspace, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace flash_dmattn::internal::cuda
