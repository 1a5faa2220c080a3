// The order of selection as the order of unsigned integers: what the host's and a device's passes share.
#pragma once

#include <cstdint>

namespace flash_dmattn::internal {

// The storage of a floating-point format, as far as ordering its values needs it.
template <typename BitsType, BitsType kInfinityBits>
struct FloatFormat {
  using Bits = BitsType;
  static constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  static constexpr Bits kInfinity = kInfinityBits;
};
using Float16Format = FloatFormat<std::uint16_t, 0x7c00>;
using BFloat16Format = FloatFormat<std::uint16_t, 0x7f80>;
using Float32Format = FloatFormat<std::uint32_t, 0x7f800000>;
using Float64Format = FloatFormat<std::uint64_t, 0x7ff0000000000000>;

// A number that grows with the score: -0 as 0, every NaN the same and highest; 0 for what is never kept, -inf
// and the lowest finite value.
template <typename Format>
constexpr typename Format::Bits rank_of(typename Format::Bits score) {
  using Bits = typename Format::Bits;
  const Bits magnitude = static_cast<Bits>(score & static_cast<Bits>(~Format::kSign));
  if (magnitude > Format::kInfinity) return static_cast<Bits>(~Bits{0});
  if (magnitude == 0) return Format::kSign;
  if (score == magnitude) return static_cast<Bits>(score | Format::kSign);
  return magnitude >= Format::kInfinity - 1 ? Bits{0} : static_cast<Bits>(~score);
}

}  // namespace flash_dmattn::internal
