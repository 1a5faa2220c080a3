// Which kernels run on this CPU.
#pragma once

#include "cpu/kernel_set.h"

namespace flash_dmattn::internal::cpu {

struct ChosenKernels {
  const KernelSet* set = nullptr;
  const Kernels* kernels = nullptr;
};

// The fastest kernels for the dtype that this CPU can run, within FLASH_DMATTN_ISA. Decided once.
ChosenKernels choose_kernels(DType dtype);

}  // namespace flash_dmattn::internal::cpu
