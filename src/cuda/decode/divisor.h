// Division by a number that the host knows: a product and a shift instead of some forty instructions.
// Granlund and Montgomery, Division by Invariant Integers using Multiplication, PLDI 1994.
#pragma once

#include <bit>
#include <cstdint>

namespace flash_dmattn::internal::cuda {

// The upper half of a product.
constexpr std::uint32_t upper_product(std::uint32_t a, std::uint32_t b) {
#ifdef __CUDA_ARCH__
  return __umulhi(a, b);  // of the expression below the compiler makes three instructions
#else
  return static_cast<std::uint32_t>(std::uint64_t{a} * b >> 32);
#endif
}

class Divisor {
 public:
  // 1 to 2^31 - 1.
  constexpr explicit Divisor(std::int32_t value = 1)
      : value_(static_cast<std::uint32_t>(value)), shift_(std::bit_width(value_ - 1)) {
    factor_ = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + shift_)) - 1) / value_ + 1);
  }

  constexpr std::uint32_t value() const { return value_; }

  // dividend / value, exact for less than 2^31 because the factor is too large by less than 2^shift / value. Of twice
  // the dividend, so that the upper half of the product is all that is asked for.
  constexpr std::uint32_t quotient(std::uint32_t dividend) const {
    return upper_product(2 * dividend, factor_) >> shift_;
  }

 private:
  std::uint32_t value_;
  int shift_;
  std::uint32_t factor_;  // dividend / value is dividend * factor >> (31 + shift)
};

}  // namespace flash_dmattn::internal::cuda
