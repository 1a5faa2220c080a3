// In place of src/cuda/ptx/flags.cuh. Others run before a number is read, as it is read in loops.
#pragma once

#include <cstdint>

#include "emulation.h"

namespace flash_dmattn::internal::cuda {

inline std::int32_t load_acquiring(const std::int32_t* flag) {
  cuda_emulation::give_way();
  return *flag;
}
inline void store_releasing(std::int32_t* flag, std::int32_t value) { *flag = value; }
inline void add_releasing(std::int32_t* flag, std::int32_t value) { *flag += value; }
inline std::int32_t add_releasing_and_acquiring(std::int32_t* flag, std::int32_t value) {
  return atomicAdd(flag, value);
}

}  // namespace flash_dmattn::internal::cuda
