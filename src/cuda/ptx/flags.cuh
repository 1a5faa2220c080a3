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

}  // namespace flash_dmattn::internal::cuda
