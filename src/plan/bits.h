// Rows of visibility as packed bits: bit k % 64 of word k / 64 tells whether key k is visible.
#pragma once

#include <cstdint>

namespace flash_dmattn::internal {

constexpr int kWordBits = 64;

constexpr std::int64_t words_for(std::int64_t keys) { return (keys + kWordBits - 1) / kWordBits; }

// The lowest `count` bits, for count from 0 (or less) to 64 (or more).
constexpr std::uint64_t low_bits(std::int64_t count) {
  return count <= 0 ? 0 : count >= kWordBits ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
}

// Packs `count` bools that are `stride` bytes apart (any nonzero byte is true). The last word's unused
// bits are 0. Writes words_for(count) words.
void pack_bools(const std::uint8_t* bools, std::int64_t stride, std::int64_t count, std::uint64_t* words);

// Keeps the bits of `words` that `keep` selects and moves them together, in place. Both have `count`
// words; the result's unused words are left as they are.
void compact_bits(const std::uint64_t* keep, std::int64_t count, std::uint64_t* words);

// Writes the positions of the set bits, plus `base`, in ascending order; returns how many.
std::int64_t list_bits(const std::uint64_t* words, std::int64_t count, std::int64_t base, std::int32_t* positions);

}  // namespace flash_dmattn::internal
