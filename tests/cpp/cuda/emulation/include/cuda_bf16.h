// In place of the CUDA toolkit's: what kernels here use of it.
#pragma once

#include <bit>
#include <cstdint>

class __nv_bfloat16 {
 public:
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const bool is_nan = value != value;
    bits_ = static_cast<std::uint16_t>(is_nan ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return std::bit_cast<float>(std::uint32_t{bits_} << 16); }

 private:
  std::uint16_t bits_;
};
