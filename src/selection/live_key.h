// A key of a selection as one unsigned integer, which orders keys as the selection does. For the host: GPUs have no
// integer that is wide enough for float64.
#pragma once

#include <cstdint>
#include <type_traits>

namespace flash_dmattn::internal {

__extension__ typedef unsigned __int128 Uint128;

// The key's rank (rank.h), and below it its index, so that among equals the oldest is the lowest.
template <typename Bits>
using LiveKey = std::conditional_t<sizeof(Bits) == 8, Uint128, std::uint64_t>;

template <typename Bits>
LiveKey<Bits> live_key(Bits rank, std::int64_t index) {
  return static_cast<LiveKey<Bits>>(rank) << 32 | static_cast<std::uint32_t>(index);
}
template <typename Live>
std::int64_t index_of(Live key) {
  return static_cast<std::uint32_t>(key);
}

}  // namespace flash_dmattn::internal
