// What the roles of an sm90 block hand to each other: stages of shared memory, and turns.
#pragma once

#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

constexpr int kWarpGroup = 128;

// Named barriers of the forward's block, the first of those with one for each consumer; turns are the backward's, too.
constexpr int kClearBarrier = 1, kTurnBarrier = 2, kCalmBarrier = 5;
// Of the backward's block, where its two consumers meet.
constexpr int kMeetBarrier = 4;

// The two barriers of each stage: a phase of "full" ends when what was copied there has arrived, one of "empty" when
// every consumer has read it.
template <int kStages>
struct Pipeline {
  std::uint64_t full[kStages], empty[kStages];

  __device__ void init(int producers, int consumers) {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(shared_address(&full[stage]), producers);
      init_barrier(shared_address(&empty[stage]), consumers);
    }
  }
};

// Where a role stands in a pipeline: tile n is in stage n % kStages, in round n / kStages.
template <int kStages>
struct Position {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

}  // namespace flash_dmattn::internal::cuda::sm90
