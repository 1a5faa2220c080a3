// Barriers in shared memory that also count bytes of copies under way (mbarrier, sm_90), named barriers, and what warps
// of different roles need beside them. PTX ISA, "mbarrier" and "setmaxnreg".
#pragma once

#include <cstdint>

namespace flash_dmattn::internal::cuda {

// A barrier is its address in shared memory, 8 bytes. Its phases end one after another; a wait names the parity of the
// phase that it waits for: 0 for the first.
__device__ inline void init_barrier(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// After the last init_barrier, before the block's other threads or copies use any of them.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and keeps the phase open until copies have brought `bytes`.
__device__ inline void arrive_expecting(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Keeps the phase open likewise, without arriving.
__device__ inline void expect_bytes(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives once all copies (cp.async) that this thread has started are there.
__device__ inline void arrive_when_copied(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ inline void wait(std::uint32_t barrier, std::uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni over;\n"
      "bra.uni again;\n"
      "over:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether the phase has ended.
__device__ inline bool has_ended(std::uint32_t barrier, std::uint32_t parity) {
  int ended;
  asm volatile(
      "{\n"
      ".reg .pred ended;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
      "selp.s32 %0, 1, 0, ended;\n"
      "}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

// What this thread wrote to shared memory is seen by later tensor core products and bulk copies.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barrier `id` (1 to 15) among `threads` threads of the block: `sync` waits, `arrive` only counts.
__device__ inline void sync_named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void arrive_named_barrier(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits, and says whether `value` holds in all the threads.
__device__ inline bool all_at_named_barrier(int id, int threads, bool value) {
  int all;
  asm volatile(
      "{\n"
      ".reg .pred own, all;\n"
      "setp.ne.s32 own, %1, 0;\n"
      "bar.red.and.pred all, %2, %3, own;\n"
      "selp.s32 %0, 1, 0, all;\n"
      "}"
      : "=r"(all)
      : "r"(static_cast<int>(value)), "r"(id), "r"(threads)
      : "memory");
  return all != 0;
}

// Registers a thread from here on; by all warps of a warp group. A multiple of 8.
template <int kRegisters>
__device__ inline void give_registers_up() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace flash_dmattn::internal::cuda
