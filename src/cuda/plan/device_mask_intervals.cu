#include "cuda/plan/device_mask_intervals.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "core/arena.h"
#include "cuda/launch_blocks.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

// A block looks at some rows of a strip of keys, a lane at four neighbours: per key the first and the last row that
// sees it and how many do. Blocks join these by atomics, and the rows of a key follow one another exactly if the count
// is the distance.
constexpr int kThreads = 128;
constexpr int kLaneKeys = 4;  // a byte each in the words below
constexpr int kStripKeys = kThreads * kLaneKeys;
constexpr int kSegmentRows = 240;  // at most 255, which is what a byte counts to
constexpr int kLoads = 8;          // rows in flight

constexpr int kKeyThreads = 256;  // of the kernels that look at counts

constexpr std::int32_t kUnseen = INT32_MAX;

std::int64_t strips_of(const MaskIntervalsProblem& problem) { return (problem.keys + kStripKeys - 1) / kStripKeys; }
std::int64_t segments_of(const MaskIntervalsProblem& problem) {
  return (problem.rows + kSegmentRows - 1) / kSegmentRows;
}
std::int64_t key_blocks_of(const MaskIntervalsProblem& problem) {
  return problem.batch * problem.heads * problem.keys / kKeyThreads + 1;
}

struct Arrays {
  std::int32_t* counts;  // (batch, heads, keys)
  int* inexact;
};

Arrays take_arrays(Arena& arena, const MaskIntervalsProblem& problem) {
  const auto keys = static_cast<std::size_t>(problem.batch * problem.heads * problem.keys);
  return {arena.take<std::int32_t>(keys), arena.take<int>(1)};
}

__global__ void clear_kernel(const MaskIntervalsProblem problem, const Arrays arrays, std::int64_t keys) {
  const std::int64_t key = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (key == 0) *arrays.inexact = 0;
  if (key >= keys) return;
  arrays.counts[key] = 0;
  problem.begin[key] = kUnseen;
  problem.end[key] = 0;
}

// Bytes of 0 or 1: which of the lane's keys the row sees. `entries` points at the first; the others exist up to
// `valid`.
template <bool kWords>
__device__ inline std::uint32_t load_row(const std::uint8_t* entries, std::int64_t key_stride, int valid) {
  std::uint32_t bytes = 0;
  if (kWords && valid == kLaneKeys) {
    bytes = __ldg(reinterpret_cast<const std::uint32_t*>(entries));
  } else {
#pragma unroll
    for (int k = 0; k < kLaneKeys; ++k) {
      if (k < valid) bytes |= static_cast<std::uint32_t>(__ldg(entries + k * key_stride)) << (8 * k);
    }
  }
  return __vsetgtu4(bytes, 0);
}

// kWords: neighbouring keys are neighbouring bytes and every row is aligned to 4 bytes.
template <bool kWords>
__global__ __launch_bounds__(kThreads) void find_kernel(const MaskIntervalsProblem problem, const Arrays arrays,
                                                        std::uint32_t strips, std::uint32_t segments) {
  const std::uint32_t strip = blockIdx.x % strips, segment = blockIdx.x / strips % segments;
  const std::uint32_t plane = blockIdx.x / strips / segments;
  const std::int64_t first_key = std::int64_t{strip} * kStripKeys + threadIdx.x * kLaneKeys;
  const std::int64_t first_row = std::int64_t{segment} * kSegmentRows;
  const int rows = static_cast<int>(min(problem.rows - first_row, std::int64_t{kSegmentRows}));
  // Under the causal rule with every key existing, which hides least, row r sees its first r + shift keys.
  const std::int64_t shift = problem.is_causal ? first_row + problem.keys - problem.rows + 1 - first_key : kLaneKeys;
  const int existing = static_cast<int>(max(min(problem.keys - first_key, std::int64_t{kLaneKeys}), std::int64_t{0}));
  const std::uint8_t* entries = problem.mask + plane / problem.heads * problem.strides[0] +
                                plane % problem.heads * problem.strides[1] + first_row * problem.strides[2] +
                                first_key * problem.strides[3];

  std::uint32_t count = 0, before = 0,
                last = 0;  // rows that see, rows before the first, one past the last; a byte each
  std::uint32_t unseen = 0x01010101u;
  for (int row = 0; row < rows; row += kLoads) {
    std::uint32_t seen[kLoads];
#pragma unroll
    for (int r = 0; r < kLoads; ++r) {
      const std::int64_t shown = problem.is_causal ? shift + row + r : kLaneKeys;
      const int valid = row + r < rows ? static_cast<int>(max(min(shown, std::int64_t{existing}), std::int64_t{0})) : 0;
      seen[r] = load_row<kWords>(entries + (row + r) * problem.strides[2], problem.strides[3], valid);
    }
#pragma unroll
    for (int r = 0; r < kLoads; ++r) {
      count += seen[r];
      unseen &= ~seen[r];
      before += unseen;
      const std::uint32_t whole = seen[r] * 0xffu;
      last = (last & ~whole) | (static_cast<std::uint32_t>(row + r + 1) * 0x01010101u & whole);
    }
  }
#pragma unroll
  for (int k = 0; k < kLaneKeys; ++k) {
    const auto key_count = static_cast<std::int32_t>(count >> (8 * k) & 0xff);
    if (key_count == 0) continue;
    const std::int64_t key = plane * problem.keys + first_key + k;
    const auto base = static_cast<std::int32_t>(first_row);
    atomicAdd(arrays.counts + key, key_count);
    atomicMin(problem.begin + key, base + static_cast<std::int32_t>(before >> (8 * k) & 0xff));
    atomicMax(problem.end + key, base + static_cast<std::int32_t>(last >> (8 * k) & 0xff));
  }
}

__global__ void judge_kernel(const MaskIntervalsProblem problem, const Arrays arrays, std::int64_t keys) {
  const std::int64_t key = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (key >= keys) return;
  const std::int32_t count = arrays.counts[key];
  if (count == 0) {
    problem.begin[key] = 0;
  } else if (count != problem.end[key] - problem.begin[key]) {
    *arrays.inexact = 1;
  }
}

}  // namespace

std::size_t mask_intervals_bytes(const MaskIntervalsProblem& problem) {
  Arena arena(nullptr);
  take_arrays(arena, problem);
  return arena.used();
}

bool mask_intervals_fit(const MaskIntervalsProblem& problem) {
  // No more than the mask has entries, of which 64 bits can count the bytes.
  const std::int64_t blocks = problem.batch * problem.heads * strips_of(problem) * segments_of(problem);
  return std::max(blocks, key_blocks_of(problem)) <= INT32_MAX;
}

cudaError_t mask_intervals(const MaskIntervalsProblem& problem, void* workspace, const int** inexact,
                           cudaStream_t stream) {
  Arena arena(workspace);
  const Arrays arrays = take_arrays(arena, problem);
  *inexact = arrays.inexact;
  const std::int64_t planes = problem.batch * problem.heads, keys = planes * problem.keys;
  if (!mask_intervals_fit(problem)) return cudaErrorInvalidConfiguration;
  const LaunchShape over_keys = {key_blocks_of(problem), kKeyThreads};
  cudaError_t error = launch_blocks(clear_kernel, over_keys, stream, problem, arrays, keys);
  if (error != cudaSuccess) return error;
  const std::int64_t strips = strips_of(problem), segments = segments_of(problem);
  const std::int64_t bytes = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(problem.mask)) |
                             problem.strides[0] | problem.strides[1] | problem.strides[2];
  error = launch_blocks(problem.strides[3] == 1 && bytes % 4 == 0 ? find_kernel<true> : find_kernel<false>,
                        {planes * strips * segments, kThreads}, stream, problem, arrays,
                        static_cast<std::uint32_t>(strips), static_cast<std::uint32_t>(segments));
  if (error != cudaSuccess) return error;
  return launch_blocks(judge_kernel, over_keys, stream, problem, arrays, keys);
}

}  // namespace flash_dmattn::internal::cuda
