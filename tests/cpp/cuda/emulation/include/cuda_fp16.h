// In place of the CUDA toolkit's header of the same name.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

class __half {
 public:
  __half() = default;
  explicit __half(float value) {
    const auto sign = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16 & 0x8000);
    const float size = std::fabs(value);
    if (std::isnan(value)) {
      bits_ = 0x7fff;
    } else if (size >= 65520) {  // would round to 2^16
      bits_ = sign | 0x7c00;
    } else {
      // A unit in the last place; numbers below 2^-14 share that of the smallest normal one.
      const int exponent = size == 0 ? -14 : std::max(std::ilogb(size), -14);
      const auto units = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));
      // Units of normal numbers are 1024 and more; one that rounds up to 2048 counts the exponent up.
      bits_ = static_cast<std::uint16_t>(sign | ((exponent + 14) * 1024 + units));
    }
  }
  explicit operator float() const {
    const int exponent = bits_ >> 10 & 31, fraction = bits_ & 1023;
    float size = std::ldexp(static_cast<float>(exponent == 0 ? fraction : fraction + 1024), std::max(exponent, 1) - 25);
    if (exponent == 31) size = fraction == 0 ? INFINITY : NAN;
    return (bits_ & 0x8000) != 0 ? -size : size;
  }

  static __half of(std::uint16_t bits) {
    __half value;
    value.bits_ = bits;
    return value;
  }
  std::uint16_t bits() const { return bits_; }

 private:
  std::uint16_t bits_;
};

inline __half __float2half(float value) { return __half(value); }
inline float __half2float(__half value) { return static_cast<float>(value); }
inline __half __ushort_as_half(std::uint16_t bits) { return __half::of(bits); }
inline std::uint16_t __half_as_ushort(__half value) { return value.bits(); }
