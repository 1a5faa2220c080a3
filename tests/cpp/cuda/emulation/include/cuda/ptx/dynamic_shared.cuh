// In place of src/cuda/ptx/dynamic_shared.cuh.
#pragma once

#include "emulation.h"

namespace flash_dmattn::internal::cuda {

template <typename T>
T* dynamic_shared() {
  return static_cast<T*>(cuda_emulation::dynamic_shared_memory());
}

inline unsigned char* dynamic_shared_panels() { return dynamic_shared<unsigned char>(); }

}  // namespace flash_dmattn::internal::cuda
