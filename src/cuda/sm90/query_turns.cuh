// The order in which blocks of a deterministic sm90 backward add to the sums of dquery: of a tile of rows one tile of
// keys after another, as they are numbered in their entry (attention/key_works.cuh).
//
// A step may be added once the tile before, of those that meet the same rows, has been. One producer warp waits for
// that, and tells consumers, which are computing the step meanwhile; another warp says that consumers have added it. So
// what either warp waits for takes no time of the other. Works are taken in order, and one waits only for those before
// it; whatever the second warp waits for, it goes on to say what has been added.
#pragma once

#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/flags.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/pipeline.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

// In shared memory. Steps are those of all works, one after another.
template <typename Config>
class QueryTurns {
 public:
  static constexpr int kPlaces = Config::kTurnPlaces;

  __device__ void init() {
    asked_ = granted_ = brought_ = said_ = 0;
    for (int place = 0; place < kPlaces; ++place) {
      init_barrier(shared_address(&come_[place]), 1);
      init_barrier(shared_address(&added_[place]), 4 * Config::kConsumers);
    }
  }

  // ---- By consumers: of a step that has `place`, in a round of that parity

  __device__ void wait_for_turn(std::uint32_t place, std::uint32_t parity) const {
    wait(shared_address(&come_[place]), parity);
  }
  // By each warp, when it has added all that it adds of the step.
  __device__ void pass_turn(std::uint32_t place) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(shared_address(&added_[place]));
  }

  // ---- By the thread that waits for turns

  // When it has handed on a step that adds to sums `sums` after tile `previous` of its entry.
  __device__ void ask(std::int32_t sums, int previous) { asked_turns_[asked_++ % kMostSteps] = {sums, previous + 1}; }

  // Waits for turns but those of the last `late` steps, and tells consumers.
  __device__ void grant(const SumTurns& turns, std::uint32_t late) {
    for (; asked_ - granted_ > late; ++granted_) {
      const Turn turn = asked_turns_[granted_ % kMostSteps];
      while (turn.tile > 0 && load_acquiring(turns.queries + turn.sums) < turn.tile) continue;
      arrive(shared_address(&come_[granted_ % kPlaces]));
    }
  }

  // ---- By the thread that says what has been added

  // Before it hands on a step that adds to sums `sums` as tile `tile` of its entry.
  __device__ void bring(std::int32_t sums, int tile) { steps_[brought_++ % kMostSteps] = {sums, tile + 1}; }

  __device__ void say(const SumTurns& turns) {
    for (; said_ != brought_ && is_added(said_); ++said_) {
      const Turn step = steps_[said_ % kMostSteps];
      store_releasing(turns.queries + step.sums, step.tile);
    }
  }

  // While it waits for a barrier of the block.
  __device__ void say_until(std::uint32_t barrier, std::uint32_t parity, const SumTurns& turns) {
    while (!has_ended(barrier, parity)) say(turns);
  }
  // After the last work.
  __device__ void say_all(const SumTurns& turns) {
    while (said_ != brought_) say(turns);
  }

 private:
  static constexpr std::uint32_t kMostSteps = 8;  // between one that is brought and one that is added

  __device__ bool is_added(std::uint32_t step) const {
    return has_ended(shared_address(&added_[step % kPlaces]), step / kPlaces % 2);
  }

  struct Turn {
    std::int32_t sums;  // tile of rows, of all in all colors
    std::int32_t tile;  // of keys, plus 1
  };
  // A phase ends when a step's turn has come, and when all warps have added it. Steps take the places by turns: none
  // comes to either before that which had its place is done with it, so that phases are not mistaken.
  std::uint64_t come_[kPlaces], added_[kPlaces];
  Turn asked_turns_[kMostSteps], steps_[kMostSteps];
  std::uint32_t asked_, granted_, brought_, said_;  // how many steps
};

}  // namespace flash_dmattn::internal::cuda::sm90
