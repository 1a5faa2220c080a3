// The order in which a launch's blocks start. Blocks differ in how many tiles they visit; one that starts among the
// last and visits many would keep the launch waiting while most of the GPU is idle. The last blocks therefore start
// longest first (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). Those before them keep their order, in
// which neighbours share keys in the cache.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/launch_blocks.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/flags.cuh"

namespace flash_dmattn::internal::cuda {

// Which of `blocks` blocks comes at this place of the order.
__device__ inline unsigned ordered_block(const BlockOrder& order, unsigned place, unsigned blocks) {
  const unsigned first = blocks - static_cast<unsigned>(order.count);
  return place < first ? place : first + static_cast<unsigned>(order.blocks[place - first]);
}
// In a kernel whose blocks stay, and which runs beside the one that puts the last of them in order: until it has.
__device__ inline void wait_for_order(const BlockOrder& order) {
  while (load_acquiring(order.taken + 1) == 0) continue;
}
// Which block the running one is to be.
__device__ inline unsigned ordered_block(const BlockOrder& order) {
  return ordered_block(order, blockIdx.x, gridDim.x);
}

// Sorts one value a thread, the highest to the first thread (Batcher's bitonic sort, 1968). `shared`: memory for
// one value a thread.
__device__ inline unsigned descending(unsigned own, unsigned* shared) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int sorted = 2; sorted <= kMostOrderedBlocks; sorted *= 2) {
    for (int distance = sorted / 2; distance > 0; distance /= 2) {
      unsigned other;
      if (distance < 32) {
        other = __shfl_xor_sync(~0u, own, distance);
      } else {
        __syncthreads();
        shared[thread] = own;
        __syncthreads();
        other = shared[thread ^ distance];
      }
      // Runs of `sorted` values end up falling and rising in turn.
      const bool takes_higher = ((thread & distance) == 0) == ((thread & sorted) == 0);
      own = takes_higher ? max(own, other) : min(own, other);
    }
  }
  return own;
}

// Writes the order of the last `count` blocks to `order`. visits_of(index, lane, lanes): the tiles that block `index`
// of these visits, a lane's share of them. By kMostOrderedBlocks threads, of which as many as there are look at a
// block.
template <typename VisitsOf>
__device__ inline void order_last_blocks(int count, std::int32_t* order, VisitsOf visits_of) {
  int lanes = 1;
  while (lanes < 32 && 2 * lanes * count <= kMostOrderedBlocks) lanes *= 2;
  const int thread = static_cast<int>(threadIdx.x), index = thread / lanes;
  int visits = index < count ? visits_of(index, thread % lanes, lanes) : 0;
  for (int distance = lanes / 2; distance > 0; distance /= 2) visits += __shfl_xor_sync(~0u, visits, distance);
  // By what they visit, then by number: no two are equal. 0 where there is none.
  __shared__ unsigned ranked[kMostOrderedBlocks];
  ranked[thread] = 0;
  __syncthreads();
  if (thread % lanes == 0 && index < count) {
    constexpr int kMostVisits = INT_MAX / kMostOrderedBlocks;
    ranked[index] =
        static_cast<unsigned>(min(visits, kMostVisits) * kMostOrderedBlocks + kMostOrderedBlocks - 1 - index);
  }
  __syncthreads();
  const unsigned own = descending(ranked[thread], ranked);
  if (thread < count) order[thread] = kMostOrderedBlocks - 1 - static_cast<int>(own % kMostOrderedBlocks);
}

// Sorts the last `params.order.count` of `blocks` blocks. Block::visits(params, block, lane, lanes) counts a lane's
// share of the tiles that a block visits. Those that stay may begin meanwhile, and wait when they come to these.
template <typename Block, typename Params>
__global__ void __launch_bounds__(kMostOrderedBlocks)
    order_blocks_kernel(const __grid_constant__ Params params, int blocks) {
  wait_for_kernels_before();
  std::int32_t* taken = params.order.taken;
  if (taken != nullptr) {
    if (threadIdx.x == 0) {
      taken[0] = taken[1] = 0;
      __threadfence();  // before the next kernel begins
    }
    __syncthreads();
  }
  let_next_kernel_begin();
  const int count = params.order.count;
  order_last_blocks(count, params.order.blocks, [&](int index, int lane, int lanes) {
    return Block::visits(params, static_cast<unsigned>(blocks - count + index), lane, lanes);
  });
  if (taken == nullptr) return;
  __syncthreads();
  if (threadIdx.x == 0) store_releasing(taken + 1, 1);
}

// Orders the last `wanted` of `blocks` blocks and says in params.order how many these are: none if all of them, or
// nearly, run at the same time, `at_once`.
template <typename Block, typename Params>
cudaError_t order_blocks(Params* params, std::int64_t blocks, std::int64_t at_once, std::int64_t wanted,
                         cudaStream_t stream) {
  if (params->order.blocks == nullptr || blocks <= at_once || blocks > INT_MAX) return cudaSuccess;
  params->order.count = static_cast<int>(std::min<std::int64_t>({blocks, wanted, kMostOrderedBlocks}));
  const LaunchShape shape = {.blocks = 1, .threads = kMostOrderedBlocks, .is_dependent = true};
  return launch_blocks(order_blocks_kernel<Block, Params>, shape, stream, *params, static_cast<int>(blocks));
}

}  // namespace flash_dmattn::internal::cuda
