// Copies between memories, one instruction each. All run on sm_80 and later.
#pragma once

#include <cstdint>

namespace flash_dmattn::internal::cuda {

__device__ inline std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same shared memory at an address that the compiler keeps in a register. Of an array it would make the address
// anew for every access, from a special register that takes long to read.
__device__ inline unsigned char* at_kept_address(unsigned char* memory) {
  std::uint32_t address = shared_address(memory);
  asm volatile("" : "+r"(address));
  return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
}

// Which lines L2 lets go of first (PTX ISA, "Cache Eviction Priority Hints"): those that are read or written once, or
// those that are not said to be kept. The numbers are what createpolicy.fractional makes of whole ranges; the compiler
// would make them anew at every access.
enum class L2Policy : std::uint64_t { kUsedOnce = 0x12F0000000000000, kKept = 0x14F0000000000000 };

// 16 bytes from global to shared memory in the background, past L1; zeros if not `valid` (nothing is read then).
__device__ inline void copy_async_16(std::uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}
__device__ inline void copy_async_16(std::uint32_t shared, const void* global, bool valid, L2Policy policy) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(shared), "l"(global),
               "r"(bytes), "l"(policy)
               : "memory");
}
// 4 bytes, likewise.
__device__ inline void copy_async_4(std::uint32_t shared, const void* global, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `Pending` of this thread's latest groups are under way.
template <int Pending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(std::uint32_t (&fragment)[4], std::uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared)
               : "memory");
}
__device__ inline void load_matrices_transposed(std::uint32_t (&fragment)[4], std::uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(shared)
               : "memory");
}

__device__ inline void store_shared(std::uint32_t shared, std::uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}

__device__ inline void store_shared_8(std::uint32_t shared, const std::uint32_t (&words)[2]) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(shared), "r"(words[0]), "r"(words[1]) : "memory");
}
__device__ inline void store_shared_16(std::uint32_t shared, const std::uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}

__device__ inline std::uint32_t load_shared(std::uint32_t shared) {
  std::uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
  return value;
}
__device__ inline float2 load_shared_float2(std::uint32_t shared) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(shared) : "memory");
  return value;
}
__device__ inline void load_shared_8(std::uint32_t (&words)[2], std::uint32_t shared) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(shared) : "memory");
}
__device__ inline void load_shared_16(std::uint32_t (&words)[4], std::uint32_t shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared)
               : "memory");
}

__device__ inline void prefetch_to_l1(const void* global) { asm volatile("prefetch.global.L1 [%0];" ::"l"(global)); }

// Adds four neighbouring floats, aligned to 16 bytes.
__device__ inline void add_to_global(float* sum, float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sum), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
#else
  atomicAdd(sum, a);
  atomicAdd(sum + 1, b);
  atomicAdd(sum + 2, c);
  atomicAdd(sum + 3, d);
#endif
}
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
__device__ inline void add_to_global(float* sum, float a, float b, float c, float d, L2Policy policy) {
  asm volatile("red.global.add.L2::cache_hint.v4.f32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(sum), "f"(a), "f"(b), "f"(c),
               "f"(d), "l"(policy)
               : "memory");
}
#endif

}  // namespace flash_dmattn::internal::cuda
