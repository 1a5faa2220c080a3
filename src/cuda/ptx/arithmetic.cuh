// Arithmetic that C++ has no words for: instructions of their own, and values that the compiler is kept from keeping.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash_dmattn::internal::cuda {

// The same value, of which the compiler knows nothing: what depends on it is computed where it is used, instead of
// being kept in registers over a whole loop.
__device__ inline int recomputed(int value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ inline std::uint32_t recomputed(std::uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
template <typename T>
__device__ inline T* recomputed(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}

// base + index * stride in one instruction; `stride` in bytes.
__device__ inline const std::uint16_t* offset_pointer(const std::uint16_t* base, std::int32_t index,
                                                      std::int32_t stride) {
  const std::uint16_t* pointer;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(pointer) : "r"(index), "r"(stride), "l"(base));
  return pointer;
}

// Two floats rounded to the nearest, `low` in the low half.
template <typename Element>
__device__ inline std::uint32_t pack(float low, float high) {
  std::uint32_t packed;
  if constexpr (__is_same(Element, __nv_bfloat16)) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// The two numbers of a packed pair.
template <typename Element>
__device__ inline float2 unpack(std::uint32_t packed) {
  if constexpr (__is_same(Element, __nv_bfloat16)) {
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000)};
  } else {
    return __half22float2(*reinterpret_cast<const __half2*>(&packed));
  }
}

// a b + c of each half.
template <typename Element>
__device__ inline std::uint32_t multiply_add(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t sum;
  if constexpr (__is_same(Element, __nv_bfloat16)) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  }
  return sum;
}

// Half words that repeat the sign of byte n of `low`, and of byte n of `high`.
__device__ inline std::uint32_t signs_of_bytes(std::uint32_t low, std::uint32_t high, int n) {
  std::uint32_t signs;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(signs) : "r"(low), "r"(high), "r"(0xCC88 + 0x1111 * n));
  return signs;
}

// 2^x
__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// `value`, but not before `power`, a power that exp2_fast has made, is there. The condition never holds: no power is
// negative.
__device__ inline float once_there(float power, float value) {
  asm("{\n"
      ".reg .pred impossible;\n"
      "setp.eq.b32 impossible, %1, 0x80000001;\n"
      "selp.b32 %0, %1, %0, impossible;\n"
      "}"
      : "+f"(value)
      : "f"(power));
  return value;
}

// 2^x, at this place of the program: the compiler does not move it. Between products of the tensor cores it is computed
// while they run.
__device__ inline float exp2_in_order(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, at this place of the program.
__device__ inline float reciprocal_in_order(float x) {
  float y;
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace flash_dmattn::internal::cuda
