// Thread block clusters (compute capability 9.0 and later): blocks that run at the same time on neighbouring
// multiprocessors, and read one another's shared memory. A launch says how many blocks a cluster has
// (launch_blocks.cuh).
#pragma once

#include <cstdint>

namespace flash_dmattn::internal::cuda {

// Whether this is code for a GPU that has clusters. Nothing else may call what follows.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kHasClusters = true;
#else
constexpr bool kHasClusters = false;
#endif

// A barrier of all threads of a cluster: what blocks have written before it, the others may read after it. Blocks whose
// shared memory others read meet once more before they end.
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Where block `rank` of the cluster has what this one has at `address` of its shared memory.
__device__ inline std::uint32_t address_in_block(std::uint32_t address, int rank) {
  std::uint32_t in_block;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(in_block) : "r"(address), "r"(rank));
  return in_block;
}

// From such an address.
__device__ inline float load_from_block(std::uint32_t address) {
  float value;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
__device__ inline float2 load_pair_from_block(std::uint32_t address) {
  float2 pair;
  asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(address) : "memory");
  return pair;
}

// This block's number in its cluster.
__device__ inline int block_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// To such addresses, all of the same block. Arrives at a barrier (mbarrier.cuh): what the thread has read of this
// block's shared memory, the other one may overwrite once it has waited for that. (With the scope of a cluster this
// would wait until all that the thread has added to global memory is there, too.)
__device__ inline void arrive_in_block(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Stores a word, and tells a barrier of its 4 bytes.
__device__ inline void store_in_block(std::uint32_t address, std::int32_t word, std::uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.s32 [%0], %1, [%2];" ::"r"(address),
               "r"(word), "r"(barrier)
               : "memory");
}
// Copies bytes of this block's shared memory, by the copy engine, and tells a barrier of them.
__device__ inline void copy_to_block(std::uint32_t address, std::uint32_t shared, std::uint32_t bytes,
                                     std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address),
      "r"(shared), "r"(bytes), "r"(barrier)
      : "memory");
}

}  // namespace flash_dmattn::internal::cuda
