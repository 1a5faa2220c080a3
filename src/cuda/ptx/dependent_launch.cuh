// Programmatic dependent launch (PTX: griddepcontrol), from compute capability 9.0 on: a kernel of a call is scheduled
// while the one before it ends, which saves most of the time between two kernels (launch_blocks.cuh).
#pragma once

namespace flash_dmattn::internal::cuda {

// By every thread, before it touches memory that other kernels of the call touch: waits until all those launched before
// are done, then lets the next one begin. In this order: the next one waits for this kernel alone, and so relies on its
// having waited for the others.
__device__ inline void begin_dependent_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// By every thread of a kernel that runs beside the one before it: lets the next one begin, which then must not need
// anything of this one or of that either, and runs beside both.
__device__ inline void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// For a kernel that needs nothing of the one before it, and so runs beside it. By every thread at its end: those after
// it wait for this kernel alone. The first block waits for all: were all blocks to wait, they would keep their places,
// and those of the kernel after it could not begin.
__device__ inline void end_dependent_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (blockIdx.x == 0) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flash_dmattn::internal::cuda
