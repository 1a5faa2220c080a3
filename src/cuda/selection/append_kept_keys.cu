#include "cuda/selection/append_kept_keys.h"

#include <climits>
#include <cstdint>
#include <type_traits>

#include "cuda/launch_blocks.cuh"
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
  for (std::int32_t place = threadIdx.x; place < count; place += kThreads) {
    // Above 0, also where a caller keeps what ranks nowhere.
    const Key key =
        indices[place] < 0 ? Key{0} : make_ranked_key<Key>(rank_of<Format>(scores[place]), indices[place]) + 1;
    const Place<Key> candidate = {key, place};
    if (candidate < lowest) lowest = candidate;
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

// A block per (batch, head). As append_head of src/selection/append_kept_keys.cpp.
template <typename Format, typename Key>
__global__ __launch_bounds__(kThreads) void append_kernel(const __grid_constant__ KeptKeysProblem problem) {
  using Bits = typename Format::Bits;
  __shared__ Place<Key> sLowest[2][kWarps];                      // of searches of even and odd number
  const auto heads = static_cast<std::uint32_t>(problem.heads);  // at most as many as blocks
  const std::int64_t position = blockIdx.x, batch = blockIdx.x / heads, head = blockIdx.x % heads;
  const auto window = static_cast<std::int32_t>(problem.window);
  const auto* new_scores = static_cast<const Bits*>(problem.new_scores) + batch * problem.new_score_strides[0] +
                           head * problem.new_score_strides[1];
  const std::int64_t first = problem.positions[batch * problem.positions_stride];
  std::int32_t* indices = problem.indices + position * window;
  Bits* scores = static_cast<Bits*>(problem.scores) + position * window;
  std::int32_t* list = problem.lists == nullptr ? nullptr : problem.lists + position * problem.new_keys * window;

  Place<Key> lowest = {};
  bool is_lowest_known = false;
  int searches = 0;
  for (std::int64_t row = 0; row < problem.new_keys; ++row) {
    const Bits score = new_scores[row * problem.new_score_strides[2]];
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
  return launch_blocks(append_kernel<Format, Key>, {problem.batch * problem.heads, kThreads}, stream, problem);
}

}  // namespace

cudaError_t append_kept_keys(const KeptKeysProblem& problem, cudaStream_t stream) {
  if (problem.window == 0 || problem.new_keys == 0) return cudaSuccess;
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
