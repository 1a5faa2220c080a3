// Numbers in global memory by which threads of different blocks tell each other how far they are. What a thread has
// done before it writes one, and what it knows to have been done by others, is seen by whoever has read it. PTX ISA,
// "memory consistency model".
#pragma once

#include <cstdint>

namespace flash_dmattn::internal::cuda {

__device__ inline std::int32_t load_acquiring(const std::int32_t* flag) {
  std::int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ inline void store_releasing(std::int32_t* flag, std::int32_t value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ inline void add_releasing(std::int32_t* flag, std::int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Says what the number was. Both of the above: what others have done before they added to it is seen, too.
__device__ inline std::int32_t add_releasing_and_acquiring(std::int32_t* flag, std::int32_t value) {
  std::int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(flag), "r"(value) : "memory");
  return before;
}

}  // namespace flash_dmattn::internal::cuda
