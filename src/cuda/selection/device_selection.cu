#include "cuda/selection/device_selection.h"

#include <algorithm>
#include <limits>

#include "cuda/selection/find_evictions.cuh"
#include "cuda/selection/layout.h"
#include "cuda/selection/merge_lists.cuh"
#include "cuda/selection/sort_chunks.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

// A window that holds every key evicts none, and one that holds no key has none to evict.
bool evicts(const SelectionProblem& problem) { return problem.window > 0 && problem.window < problem.keys; }

// Calls launch(blocks, first_block) until all `blocks` are launched: a grid has no more than 2^31 - 1.
template <typename Launch>
void launch_blocks(std::int64_t blocks, Launch launch) {
  constexpr std::int64_t kMostBlocks = std::numeric_limits<std::int32_t>::max();
  for (std::int64_t first = 0; first < blocks; first += kMostBlocks) {
    launch(static_cast<unsigned>(std::min(blocks - first, kMostBlocks)), first);
  }
}

// Whether a key's rank and index fit 32 bits, which take half the instructions of 64.
bool fits_32_bits(const SelectionProblem& problem) {
  return size_of(problem.dtype) == 2 && problem.keys <= std::int64_t{1} << kIndexBits<std::uint32_t>;
}

template <typename Format, typename Key>
void enqueue(const SelectionProblem& problem, void* workspace, cudaStream_t stream) {
  const ListLayout layout(problem, kChunkKeys<Key>);
  const std::int64_t heads = problem.batch * problem.heads, chunks = heads * layout.chunks;
  auto* lists = evicts(problem) ? static_cast<Key*>(workspace) : nullptr;
  launch_blocks(chunks, [&](unsigned blocks, std::int64_t first) {
    sort_chunks<Format, Key><<<blocks, kChunkKeys<Key>, 0, stream>>>(problem, layout, lists, first);
  });
  if (lists == nullptr) return;
  for (int level = 1; level < layout.levels; ++level) {
    const std::int64_t tiles = (layout.best_at(level) + kMergeTile<Key> - 1) / kMergeTile<Key>;
    launch_blocks(heads * layout.lists_at(level) * tiles, [&](unsigned blocks, std::int64_t first) {
      merge_lists<Key><<<blocks, kMergeThreads, 0, stream>>>(layout, lists, level, first);
    });
  }
  launch_blocks(chunks, [&](unsigned blocks, std::int64_t first) {
    find_evictions<Key><<<blocks, kEvictionThreads<Key>, 0, stream>>>(problem, layout, lists, first);
  });
}

template <typename Format>
void enqueue_16_bit_scores(const SelectionProblem& problem, void* workspace, cudaStream_t stream) {
  const auto enqueue_as = fits_32_bits(problem) ? enqueue<Format, std::uint32_t> : enqueue<Format, std::uint64_t>;
  enqueue_as(problem, workspace, stream);
}

template <typename Key>
std::size_t list_bytes(const SelectionProblem& problem) {
  const ListLayout layout(problem, kChunkKeys<Key>);
  return static_cast<std::size_t>(problem.batch * problem.heads * layout.head_keys) * sizeof(Key);
}

}  // namespace

std::size_t selection_workspace(const SelectionProblem& problem) {
  if (!evicts(problem)) return 0;
  if (problem.dtype == DType::kFloat64) return list_bytes<Uint128>(problem);
  return fits_32_bits(problem) ? list_bytes<std::uint32_t>(problem) : list_bytes<std::uint64_t>(problem);
}

cudaError_t select_keys(const SelectionProblem& problem, void* workspace, cudaStream_t stream) {
  if (problem.batch * problem.heads * problem.keys == 0) return cudaSuccess;
  switch (problem.dtype) {
    case DType::kFloat16:
      enqueue_16_bit_scores<Float16Format>(problem, workspace, stream);
      break;
    case DType::kBFloat16:
      enqueue_16_bit_scores<BFloat16Format>(problem, workspace, stream);
      break;
    case DType::kFloat32:
      enqueue<Float32Format, std::uint64_t>(problem, workspace, stream);
      break;
    case DType::kFloat64:
      enqueue<Float64Format, Uint128>(problem, workspace, stream);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace flash_dmattn::internal::cuda
