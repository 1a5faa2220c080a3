// Whole numbers of blocks. In an anonymous namespace, as everything that the CPU's kernels of several instruction sets
// include.
#pragma once

#include <cstdint>

namespace flash_dmattn::internal {
namespace {

constexpr std::int64_t ceil_div(std::int64_t value, std::int64_t divisor) { return (value + divisor - 1) / divisor; }
constexpr std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return ceil_div(value, multiple) * multiple;
}

}  // namespace
}  // namespace flash_dmattn::internal
