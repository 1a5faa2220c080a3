#include "cuda/selection/append_kept_keys.h"

#include <climits>
#include <cstdint>
#include <type_traits>

#include "cuda/launch_blocks.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/selection/ranked_key.cuh"
#include "selection/rank.h"

namespace flash_dmattn::internal::cuda {
namespace {

// Thread t looks after the places t, t + kThreads, ...: nobody else reads or writes them.
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// A place of the kept keys, and what is there: 0 in an empty place, which is lower than any key that may be kept.
template <typename Key>
struct Place {
  Key key;
  std::int32_t index;

  // The first one if several are empty.
  __device__ bool operator<(const Place& other) const {
    return key < other.key || (key == other.key && index < other.index);
  }
};

template <typename Key>
__device__ Place<Key> lowest_of_warp(Place<Key> lowest) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    const Place<Key> other = {shuffle_xor(lowest.key, distance), __shfl_xor_sync(kAllLanes, lowest.index, distance)};
    if (other < lowest) lowest = other;
  }
  return lowest;
}

// Of at least one place, the same in every thread. `shared` is used by no other call until all threads are past the
// next barrier.
template <typename Format, typename Key>
__device__ Place<Key> lowest_place(const std::int32_t* indices, const typename Format::Bits* scores, std::int32_t count,
                                   Place<Key> (&shared)[kWarps]) {
  Place<Key> lowest = {~Key{0}, INT_MAX};
  // Places that are read at the same time: the time of a step is that of its reads.
  constexpr int kBatch = sizeof(Key) > 8 ? 4 : 8;
#pragma unroll 1
  for (std::int32_t first = threadIdx.x; first < count; first += kBatch * kThreads) {
    std::int32_t index[kBatch];
    typename Format::Bits score[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const std::int32_t place = first + i * kThreads;
      index[i] = place < count ? indices[place] : -1;
      score[i] = place < count ? scores[place] : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const std::int32_t place = first + i * kThreads;
      // Above 0, also where a caller keeps what ranks nowhere.
      const Key key = index[i] < 0 ? Key{0} : make_ranked_key<Key>(rank_of<Format>(score[i]), index[i]) + 1;
      const Place<Key> candidate = {key, place};
      if (place < count && candidate < lowest) lowest = candidate;
    }
  }
  lowest = lowest_of_warp(lowest);
  if (threadIdx.x % kWarp == 0) shared[threadIdx.x / kWarp] = lowest;
  __syncthreads();
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    if (shared[warp] < lowest) lowest = shared[warp];
  }
  return lowest;
}

// The scores of a cache's first keys, for the block's (batch, head). As CacheScores of the host.
template <typename Format, typename Key>
struct CacheScores {
  const typename Format::Bits* scores;
  std::int64_t stride, keys;

  // 0: never kept.
  __device__ Key key(std::int64_t index) const {
    const typename Format::Bits rank = rank_of<Format>(scores[index * stride]);
    return rank == 0 ? Key{0} : make_ranked_key<Key>(rank, index);
  }
};

constexpr int kDigitBits = 8, kDigits = 1 << kDigitBits;
static_assert(kDigits == kThreads, "a thread counts each digit");

struct ChoiceMemory {
  std::int32_t counts[kDigits];  // of keys that have the digit
  std::int32_t of_warps[kWarps];
  std::int32_t digit, wanted;
};

// The sum over this thread and those below it; `total`: of all threads. Barriers separate calls.
__device__ inline std::int32_t block_inclusive_sum(std::int32_t value, std::int32_t (&of_warps)[kWarps],
                                                   std::int32_t* total) {
  std::int32_t sum = warp_inclusive_sum(value);
  const int own_warp = static_cast<int>(threadIdx.x) / kWarp;
  __syncthreads();
  if (threadIdx.x % kWarp == kWarp - 1) of_warps[own_warp] = sum;
  __syncthreads();
  *total = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < own_warp) sum += of_warps[warp];
    *total += of_warps[warp];
  }
  return sum;
}

// As lowest_of_best of the host, the same in every thread.
template <typename Format, typename Key>
__device__ Key lowest_of_best(const CacheScores<Format, Key>& cache, std::int32_t window, ChoiceMemory& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  Key prefix = 0, known = 0;
  std::int32_t wanted = window;
#pragma unroll 1
  for (int shift = 32 + 8 * static_cast<int>(sizeof(typename Format::Bits)) - kDigitBits; shift >= 0;
       shift -= kDigitBits) {
    __syncthreads();
    memory.counts[thread] = 0;
    if (thread == 0) memory.digit = 0;  // where there are fewer keys than are wanted
    __syncthreads();
#pragma unroll 1
    for (std::int64_t index = thread; index < cache.keys; index += kThreads) {
      const Key key = cache.key(index);
      if (key != 0 && (key & known) == prefix)
        atomicAdd(&memory.counts[static_cast<int>(key >> shift) & (kDigits - 1)], 1);
    }
    __syncthreads();
    // Thread t has digit kDigits - 1 - t, so that sums go from the highest down.
    const int digit = kDigits - 1 - thread;
    const std::int32_t count = memory.counts[digit];
    std::int32_t total;
    const std::int32_t above = block_inclusive_sum(count, memory.of_warps, &total) - count;
    if (above < wanted && (above + count >= wanted || digit == 0)) memory.digit = digit, memory.wanted = wanted - above;
    __syncthreads();
    wanted = memory.wanted;
    prefix |= static_cast<Key>(memory.digit) << shift;
    known |= static_cast<Key>(kDigits - 1) << shift;
  }
  return prefix;
}

// As choose_anew of the host. Leaves a barrier behind.
template <typename Format, typename Key>
__device__ void choose_anew(const CacheScores<Format, Key>& cache, std::int32_t window, std::int32_t* indices,
                            typename Format::Bits* scores, ChoiceMemory& memory) {
  const Key lowest = lowest_of_best(cache, window, memory);
  std::int32_t placed = 0;
#pragma unroll 1
  for (std::int64_t first = 0; first < cache.keys; first += kThreads) {
    const std::int64_t index = first + threadIdx.x;
    const Key key = index < cache.keys ? cache.key(index) : Key{0};
    const bool is_kept = key != 0 && key >= lowest;
    std::int32_t total;
    const std::int32_t place = placed + block_inclusive_sum(is_kept ? 1 : 0, memory.of_warps, &total) - 1;
    if (is_kept && place < window) {
      indices[place] = static_cast<std::int32_t>(index);
      scores[place] = cache.scores[index * cache.stride];
    }
    placed += total;
  }
  for (std::int32_t place = placed + static_cast<std::int32_t>(threadIdx.x); place < window; place += kThreads) {
    indices[place] = -1;
  }
  __syncthreads();
}

// A block per (batch, head). As append_head of src/selection/append_kept_keys.cpp.
template <typename Format, typename Key>
__global__ __launch_bounds__(kThreads) void append_kernel(const __grid_constant__ KeptKeysProblem problem) {
  using Bits = typename Format::Bits;
  __shared__ Place<Key> sLowest[2][kWarps];  // of searches of even and odd number
  __shared__ ChoiceMemory sChoice;
  begin_dependent_kernel();
  const auto heads = static_cast<std::uint32_t>(problem.heads);  // at most as many as blocks
  const std::int64_t position = blockIdx.x, batch = blockIdx.x / heads, head = blockIdx.x % heads;
  const auto window = static_cast<std::int32_t>(problem.window);
  const auto* new_scores = static_cast<const Bits*>(problem.new_scores) + batch * problem.new_score_strides[0] +
                           head * problem.new_score_strides[1];
  // Read together, before the first barrier.
  const std::int64_t first = problem.positions[batch * problem.positions_stride];
  const std::int32_t length = problem.lengths != nullptr ? problem.lengths[position] : 0;
  Bits next_score = problem.new_keys > 0 ? new_scores[0] : Bits{};
  std::int32_t* indices = problem.indices + position * window;
  Bits* scores = static_cast<Bits*>(problem.scores) + position * window;
  std::int32_t* list = problem.lists == nullptr ? nullptr : problem.lists + position * problem.new_keys * window;

  bool is_known = true;
  if (problem.lengths != nullptr) {
    is_known = length == keys_before(first);
    __syncthreads();  // all threads have looked
    if (threadIdx.x == 0) problem.lengths[position] = length_after(first, problem.new_keys);
  }
  if (window == 0) return;
  if (!is_known && problem.cache_scores != nullptr) {
    const auto* of_head = static_cast<const Bits*>(problem.cache_scores) + batch * problem.cache_score_strides[0] +
                          head * problem.cache_score_strides[1];
    const std::int64_t keys = min(keys_before(first), problem.cache_keys);
    choose_anew<Format, Key>({of_head, problem.cache_score_strides[2], keys}, window, indices, scores, sChoice);
  }

  Place<Key> lowest = {};
  bool is_lowest_known = false;
  int searches = 0;
  for (std::int64_t row = 0; row < problem.new_keys; ++row) {
    const Bits score = next_score;
    if (row + 1 < problem.new_keys) next_score = new_scores[(row + 1) * problem.new_score_strides[2]];
    const Bits rank = rank_of<Format>(score);
    const std::int64_t index = first + row;
    if (rank != 0 && index >= 0 && index <= INT_MAX) {
      if (!is_lowest_known) lowest = lowest_place<Format>(indices, scores, window, sLowest[searches++ % 2]);
      is_lowest_known = make_ranked_key<Key>(rank, index) + 1 < lowest.key;  // else its place is taken
      if (!is_lowest_known && lowest.index % kThreads == static_cast<std::int32_t>(threadIdx.x)) {
        indices[lowest.index] = static_cast<std::int32_t>(index);
        scores[lowest.index] = score;
      }
    }
    if (list == nullptr) continue;
    for (std::int32_t place = threadIdx.x; place < window; place += kThreads) {
      list[row * window + place] = indices[place];
    }
  }
}

template <typename Format>
cudaError_t launch(const KeptKeysProblem& problem, cudaStream_t stream) {
  using Key = std::conditional_t<sizeof(typename Format::Bits) == 8, Uint128, std::uint64_t>;
  return launch_blocks(append_kernel<Format, Key>, {problem.batch * problem.heads, kThreads, 0, true}, stream, problem);
}

}  // namespace

cudaError_t append_kept_keys(const KeptKeysProblem& problem, cudaStream_t stream) {
  if (!changes_something(problem)) return cudaSuccess;
  switch (problem.dtype) {
    case DType::kFloat16:
      return launch<Float16Format>(problem, stream);
    case DType::kBFloat16:
      return launch<BFloat16Format>(problem, stream);
    case DType::kFloat32:
      return launch<Float32Format>(problem, stream);
    case DType::kFloat64:
      return launch<Float64Format>(problem, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace flash_dmattn::internal::cuda
