// Which work tiles a block computes, one after another: rows of one head, or in a plan the same rows of two. A block
// stays for many, so that the next one's keys arrive while the one before is finished.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/pipeline.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

struct Work {
  enum Kind : std::uint32_t {
    kUsual,
    kHuge,  // once more, in the way of rows that may be huge (softmax.cuh)
    kNone,  // no work is left
  };
  Kind kind;
  bool found_huge;   // a row turned out to be huge
  bool is_followed;  // by another usual one, which is announced whether this one is done or not
  int index;         // of the launch's work tiles
  int batch, head, key_head, first_row;
  int existing;  // keys of the batch element
};

// Works that are announced and not yet done by all. One thread announces, all warps that take part take one after
// another. Works come as they are numbered; which block computes which is decided by a counter, if there is one. Those
// with huge rows come again at the end.
struct WorkRing {
  static constexpr int kSlots = 4;
  Pipeline<kSlots> pipeline;
  Work works[kSlots];

  // `takers`: threads.
  __device__ void init(int takers) {
    pipeline.init(1, takers);
    for (Work& work : works) work.kind = Work::kUsual, work.found_huge = false;
    next = static_cast<int>(blockIdx.x);
    huge = -1, knows_order = false;
    at = {};
  }

  // Of the announcing thread: not worth registers.
  static constexpr int kAllDone = INT_MAX;
  Position<kSlots> at;
  int next;          // work, or kAllDone
  int huge;          // the first work of a list in params.next_huge, or -1
  bool knows_order;  // wait_for_order has been called

  // Whether there is a work to announce without waiting for those before to be done.
  __device__ bool knows_next(const Sm90ForwardParams& params) const { return next < params.works; }

  // describe(work, slot) fills in the rest of what says which work it is.
  template <typename Describe>
  __device__ const Work& announce(const Sm90ForwardParams& params, Describe describe) {
    const int slot = at.stage;
    wait_until_empty(params, at);
    Work& work = works[slot];
    if (knows_next(params)) {
      work.kind = Work::kUsual, work.index = next;
      // Asked for before it is needed.
      next = static_cast<int>(gridDim.x) + (params.order.taken == nullptr ? next : atomicAdd(params.order.taken, 1));
      work.is_followed = knows_next(params);
    } else {
      if (next != kAllDone) wait_for_all(params);
      next = kAllDone;
      work.kind = huge < 0 ? Work::kNone : Work::kHuge, work.index = huge;
      if (huge >= 0) huge = params.next_huge[huge];
    }
    if (work.kind != Work::kNone) describe(work, slot);
    arrive(shared_address(&pipeline.full[slot]));
    at.advance();
    return work;
  }

 private:
  __device__ void wait_until_empty(const Sm90ForwardParams& params, const Position<kSlots>& position) {
    wait(shared_address(&pipeline.empty[position.stage]), position.parity ^ 1);
    Work& work = works[position.stage];
    if (!work.found_huge) return;
    work.found_huge = false;
    params.next_huge[work.index] = huge;
    huge = work.index;
  }

  __device__ void wait_for_all(const Sm90ForwardParams& params) {
    Position<kSlots> position = at;
#pragma unroll 1
    for (int slot = 0; slot < kSlots; ++slot, position.advance()) wait_until_empty(params, position);
  }
};

// By every warp that takes part.
class WorkTaker {
 public:
  __device__ explicit WorkTaker(WorkRing& ring) : ring_(ring) {}

  __device__ Work& take() const { return ring_.works[wait_for(taken_)]; }
  __device__ int slot() const { return static_cast<int>(taken_ % WorkRing::kSlots); }
  // Waits for the work after it; for one that is followed.
  __device__ int next_slot() const { return wait_for(taken_ + 1); }
  // Of the work that was taken. By every thread, as each has read it (ForwardScores::kKeyReleases).
  __device__ void release() {
    arrive(shared_address(&ring_.pipeline.empty[slot()]));
    ++taken_;
  }

 private:
  // Until it is announced; says in which slot.
  __device__ int wait_for(std::uint32_t work) const {
    const auto slot = static_cast<int>(work % WorkRing::kSlots);
    wait(shared_address(&ring_.pipeline.full[slot]), work / WorkRing::kSlots % 2);
    return slot;
  }

  WorkRing& ring_;
  std::uint32_t taken_ = 0;  // of which slot and parity follow: a Position would take two registers
};

}  // namespace flash_dmattn::internal::cuda::sm90
