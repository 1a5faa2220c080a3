// When keys come: of a sequence whose rows all see the same one, and of packed documents.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/selection/ranked_key.cuh"

namespace flash_dmattn::internal::cuda {

// Where a key stands. One that does not exist, or that no row can see, has no rows.
struct Arrival {
  std::int32_t document;
  std::int32_t first_row, end_row;  // the rows that see it if it is kept and never evicted

  __device__ bool exists() const { return document >= 0; }
};

// The keys of a batch element, as one document.
struct Arrivals {
  std::int64_t existing, history, rows;
  bool causal;

  __device__ Arrivals(const SelectionProblem& problem, const std::int32_t*, std::int64_t batch)
      : existing(problem.keys), rows(problem.rows), causal(problem.causal) {
    if (problem.seqlens != nullptr) {
      const std::int64_t length = problem.seqlens[batch * problem.seqlens_stride];
      existing = length < 0 ? 0 : length < existing ? length : existing;
    }
    history = existing - problem.rows;
  }

  __device__ Arrival of(std::int64_t key) const {
    return {key < existing ? 0 : -1, first_row(0, key), static_cast<std::int32_t>(rows)};
  }
  __device__ std::int32_t first_row(int, std::int64_t key) const {
    return causal && key > history ? static_cast<std::int32_t>(key - history) : 0;
  }
};

// The same of packed documents, whose `bounds` clamp_bounds has written.
struct PackedArrivals {
  const std::int32_t *row_bounds, *key_bounds;  // (documents + 1), ascending
  std::int32_t documents;
  bool causal;

  __device__ PackedArrivals(const SelectionProblem& problem, const std::int32_t* bounds, std::int64_t batch)
      : row_bounds(bounds + 2 * batch * (problem.documents + 1)),
        key_bounds(row_bounds + problem.documents + 1),
        documents(static_cast<std::int32_t>(problem.documents)),
        causal(problem.causal) {}

  __device__ Arrival of(std::int64_t key) const {
    // The last document that begins at the key or before has it, unless it ends before: documents without keys between
    // begin where that one does.
    std::int32_t first = 0, count = documents + 1;  // of the bounds that may be the first above the key
    while (count > 0) {
      const std::int32_t half = count / 2;
      if (key_bounds[first + half] <= key) {
        first += half + 1;
        count -= half + 1;
      } else {
        count = half;
      }
    }
    const std::int32_t document = first - 1;
    if (document < 0 || document == documents || row_bounds[document] == row_bounds[document + 1]) return {-1, 0, 0};
    return {document, first_row(document, key), row_bounds[document + 1]};
  }
  // Aligned to the ends of the document's rows and keys under the causal rule.
  __device__ std::int32_t first_row(int document, std::int64_t key) const {
    const std::int32_t begin = row_bounds[document];
    if (!causal) return begin;
    return max(begin, row_bounds[document + 1] - (key_bounds[document + 1] - static_cast<std::int32_t>(key)));
  }
};

constexpr int kBoundThreads = 1024;

// How many numbers clamp_bounds writes.
inline std::int64_t bound_count(const SelectionProblem& problem) {
  return problem.is_packed() ? 2 * problem.batch * (problem.documents + 1) : 0;
}

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

}  // namespace flash_dmattn::internal::cuda
