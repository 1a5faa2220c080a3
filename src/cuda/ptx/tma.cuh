// Copies of boxes of a tensor, or of bytes, between global and shared memory (cp.async.bulk, sm_90). One thread starts
// one; bytes arrive in shared memory at a barrier (mbarrier.cuh). PTX ISA, "cp.async.bulk" and "cp.async.bulk.tensor".
#pragma once

#include <cuda.h>

#include <cstdint>

namespace flash_dmattn::internal::cuda {

// The box of a (batch, head, token, column) tensor that begins there; what lies outside of the tensor arrives as zeros.
__device__ inline void load_box(std::uint32_t shared, const CUtensorMap& map, int column, int token, int head,
                                int batch, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared),
      "l"(&map), "r"(column), "r"(token), "r"(head), "r"(batch), "r"(barrier)
      : "memory");
}

// Neighbouring bytes: a multiple of 16, at such addresses.
__device__ inline void load_bytes(std::uint32_t shared, const void* global, std::uint32_t bytes,
                                  std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// The other way; what lies outside of the tensor is not written. What other threads wrote to shared memory each has to
// have fenced (fence_async_proxy).
__device__ inline void store_box(const CUtensorMap& map, int column, int token, int head, int batch,
                                 std::uint32_t shared) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(&map),
               "r"(column), "r"(token), "r"(head), "r"(batch), "r"(shared)
               : "memory");
}
// Makes a group of the thread's boxes since the last one.
__device__ inline void commit_boxes() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the thread's `kPending` latest groups have been read from shared memory.
template <int kPending>
__device__ inline void wait_boxes_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all of the thread's groups have been written.
__device__ inline void wait_boxes_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace flash_dmattn::internal::cuda
