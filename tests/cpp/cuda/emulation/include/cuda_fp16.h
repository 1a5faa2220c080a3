// In place of the CUDA toolkit's: what kernels here use of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

class __half {
 public:
  __half() = default;
  explicit __half(float value) {
    const int sign = std::signbit(value) ? 0x8000 : 0;
    int bits = 0x7fff;
    if (std::abs(value) >= 65520) {  // which rounds to infinity
      bits = 0x7c00;
    } else if (value == value) {
      const int exponent = value == 0 ? -14 : std::max(std::ilogb(value), -14);
      // Where the multiple of the last place is 2048, the sum makes the exponent one more.
      bits = (exponent + 14) * 1024 + static_cast<int>(std::nearbyint(std::ldexp(std::abs(value), 10 - exponent)));
    }
    bits_ = static_cast<std::uint16_t>(sign | bits);
  }
  explicit operator float() const {
    const int exponent = bits_ >> 10 & 31, mantissa = bits_ & 1023;
    const float size = exponent == 31  ? (mantissa == 0 ? INFINITY : NAN)
                       : exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                                       : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25);
    return (bits_ & 0x8000) != 0 ? -size : size;
  }

 private:
  std::uint16_t bits_;
};
