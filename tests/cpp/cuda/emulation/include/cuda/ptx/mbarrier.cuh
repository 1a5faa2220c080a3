// In place of src/cuda/ptx/mbarrier.cuh.
#pragma once

#include <cstdint>

#include "cuda/ptx/copy.cuh"
#include "emulation.h"

namespace flash_dmattn::internal::cuda {

// What lies in a barrier's 8 bytes.
struct EmulatedBarrier {
  std::uint16_t arrivals, missing;  // of a phase; of those the ones that have not come
  std::int32_t phase_and_bytes;     // that copies have still to bring, twice; and the parity of the phase that is open

  static EmulatedBarrier& at(std::uint32_t address) {
    return *reinterpret_cast<EmulatedBarrier*>(shared_memory_at(address, sizeof(EmulatedBarrier)));
  }
  std::uint32_t parity() const { return static_cast<std::uint32_t>(phase_and_bytes & 1); }
  void arrive() {
    if (missing == 0) cuda_emulation::fail("a barrier of %d arrivals gets one more", arrivals);
    --missing;
    end_phase();
  }
  // Negative: copies have brought so many.
  void expect(std::int32_t bytes) {
    phase_and_bytes += 2 * bytes;
    end_phase();
  }

 private:
  void end_phase() {
    if (missing != 0 || (phase_and_bytes >> 1) != 0) return;
    missing = arrivals;
    phase_and_bytes ^= 1;
  }
};
static_assert(sizeof(EmulatedBarrier) == 8);

inline void init_barrier(std::uint32_t barrier, int arrivals) {
  const auto count = static_cast<std::uint16_t>(arrivals);
  EmulatedBarrier::at(barrier) = {count, count, 0};
}
inline void fence_barrier_init() {}

inline void arrive(std::uint32_t barrier) { EmulatedBarrier::at(barrier).arrive(); }
inline void expect_bytes(std::uint32_t barrier, std::uint32_t bytes) {
  EmulatedBarrier::at(barrier).expect(static_cast<std::int32_t>(bytes));
}
inline void arrive_expecting(std::uint32_t barrier, std::uint32_t bytes) {
  expect_bytes(barrier, bytes);
  arrive(barrier);
}
// Copies `bytes` in bulk, by copy(), and tells the barrier of them.
template <typename Copy>
void copy_telling(std::uint32_t barrier, std::uint32_t bytes, Copy copy) {
  cuda_emulation::copy_in_bulk([=] {
    copy();
    EmulatedBarrier::at(barrier).expect(-static_cast<std::int32_t>(bytes));
  });
}
inline void arrive_when_copied(std::uint32_t barrier) {
  cuda_emulation::after_copies([=] { arrive(barrier); });
}

inline void wait(std::uint32_t barrier, std::uint32_t parity) {
  const EmulatedBarrier& own = EmulatedBarrier::at(barrier);
  cuda_emulation::wait_until("wait", [&own, parity] { return own.parity() != parity; });
}
// Is asked in loops.
inline bool has_ended(std::uint32_t barrier, std::uint32_t parity) {
  cuda_emulation::give_way();
  return EmulatedBarrier::at(barrier).parity() != parity;
}

inline void fence_async_proxy() {}

inline void sync_named_barrier(int id, int threads) {
  cuda_emulation::arrive_at_named_barrier(id, threads, true, true);
}
inline void arrive_named_barrier(int id, int threads) {
  cuda_emulation::arrive_at_named_barrier(id, threads, true, false);
}
inline bool all_at_named_barrier(int id, int threads, bool value) {
  return cuda_emulation::arrive_at_named_barrier(id, threads, value, true);
}

template <int kRegisters>
void give_registers_up() {}
template <int kRegisters>
void take_registers() {}

}  // namespace flash_dmattn::internal::cuda
