// In place of src/cuda/ptx/arithmetic.cuh: what kernels here use of it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

namespace flash_dmattn::internal::cuda {

template <typename T>
T recomputed(T value) {
  return value;
}

inline const std::uint16_t* offset_pointer(const std::uint16_t* base, std::int32_t index, std::int32_t stride) {
  return reinterpret_cast<const std::uint16_t*>(reinterpret_cast<const unsigned char*>(base) +
                                                std::int64_t{index} * stride);
}

template <typename Element>
std::uint32_t pack(float low, float high) {
  return Element(low).bits() | std::uint32_t{Element(high).bits()} << 16;
}

inline float exp2_fast(float x) { return std::exp2(x); }
inline float exp2_in_order(float x) { return std::exp2(x); }
inline float reciprocal_in_order(float x) { return 1 / x; }

}  // namespace flash_dmattn::internal::cuda
