// In place of src/cuda/ptx/arithmetic.cuh: what kernels here use of it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "vector_types.h"

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

template <typename Element>
float2 unpack(std::uint32_t packed) {
  return {static_cast<float>(Element::of(static_cast<std::uint16_t>(packed))),
          static_cast<float>(Element::of(static_cast<std::uint16_t>(packed >> 16)))};
}

template <typename Element>
std::uint32_t multiply_add(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const float2 x = unpack<Element>(a), y = unpack<Element>(b), z = unpack<Element>(c);
  return pack<Element>(std::fma(x.x, y.x, z.x), std::fma(x.y, y.y, z.y));
}

inline std::uint32_t signs_of_bytes(std::uint32_t low, std::uint32_t high, int n) {
  const auto sign = [n](std::uint32_t word) { return (word >> (8 * n + 7) & 1) != 0 ? 0xffffu : 0u; };
  return sign(low) | sign(high) << 16;
}

inline float once_there(float /*power*/, float value) { return value; }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float exp2_in_order(float x) { return std::exp2(x); }
inline float reciprocal_in_order(float x) { return 1 / x; }

}  // namespace flash_dmattn::internal::cuda
