// Programmatic dependent launch (PTX: griddepcontrol), from compute capability 9.0 on: a kernel is scheduled while the
// one before it ends, which saves most of the time between two kernels (launch_blocks.cuh). That one may be of an
// earlier call, or another library's: all that such a kernel does before it waits is to find out what it is to do.
#pragma once

namespace flash_dmattn::internal::cuda {

// By every thread, before it touches memory that other kernels of the call touch: waits until all those launched before
// are done.
__device__ inline void wait_for_kernels_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// By every thread: lets the next kernel begin, which runs beside this one, and beside those before it that this one has
// not waited for. It waits for what it needs of them.
__device__ inline void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Both, in this order: the next kernel waits for this one alone, and so relies on its having waited for the others.
__device__ inline void begin_dependent_kernel() {
  wait_for_kernels_before();
  let_next_kernel_begin();
}

// For a kernel that needs nothing of the one before it, and so runs beside it. By every thread at its end: those after
// it wait for this kernel alone. The first block waits for all: were all blocks to wait, they would keep their places,
// and those of the kernel after it could not begin.
__device__ inline void end_dependent_kernel() {
  if (blockIdx.x == 0) wait_for_kernels_before();
}

}  // namespace flash_dmattn::internal::cuda
