// In place of the CUDA toolkit's header of the same name.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

class __nv_bfloat16 {
 public:
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    constexpr std::uint16_t kNaN = 0x7fff;
    // To the nearest, of two that are as near to the even one.
    bits_ = std::isnan(value) ? kNaN : static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(std::uint32_t{bits_} << 16); }

  static __nv_bfloat16 of(std::uint16_t bits) {
    __nv_bfloat16 value;
    value.bits_ = bits;
    return value;
  }
  std::uint16_t bits() const { return bits_; }

 private:
  std::uint16_t bits_;
};

inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
inline float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }
inline __nv_bfloat16 __ushort_as_bfloat16(std::uint16_t bits) { return __nv_bfloat16::of(bits); }
inline std::uint16_t __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits(); }
