// The families of attention kernels, as the dispatcher sees them. A family's kernels share tiles and instructions.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>

#include "core/problem.h"
#include "cuda/device_kernels.h"
#include "flash_dmattn/status.h"

namespace flash_dmattn::internal::cuda {

// A family may have one pass only, and null for the other: plans, and what a forward leaves for the backward, are the
// same for all.
struct KernelFamily {
  const char* name;  // in logs and reports

  // Whether the family computes this pass of the problem, which is not empty and of a 16-bit type, on this GPU.
  bool (*takes_forward)(const AttentionProblem&, const Gpu&);
  // Bytes of workspace, the plan's included, by the code that divides it later. From shapes and strides alone.
  Status (*arrange_forward)(const AttentionProblem&, const Gpu&, std::size_t* bytes);
  Status (*forward)(const ForwardProblem&, const Gpu&, void* workspace, cudaStream_t);

  bool (*takes_backward)(const BackwardProblem&, const Gpu&);
  Status (*arrange_backward)(const BackwardProblem&, const Gpu&, std::size_t* bytes);
  Status (*backward)(const BackwardProblem&, const Gpu&, void* workspace, cudaStream_t);
};

extern const KernelFamily kDecodeFamily, kSm80Family;
extern const KernelFamily kSm90Family;  // in builds for sm_90 (FLASH_DMATTN_SM90)

// In the order in which they are asked. The last one takes every problem.
std::span<const KernelFamily* const> kernel_families();

// The first of them that takes it; null: none.
const KernelFamily* choose_forward(std::span<const KernelFamily* const> families, const AttentionProblem& problem,
                                   const Gpu& gpu);
const KernelFamily* choose_backward(std::span<const KernelFamily* const> families, const BackwardProblem& problem,
                                    const Gpu& gpu);

// Of kernel_families().
const KernelFamily& forward_family(const AttentionProblem& problem, const Gpu& gpu);
const KernelFamily& backward_family(const BackwardProblem& problem, const Gpu& gpu);

}  // namespace flash_dmattn::internal::cuda
