// Which keys a split owns where rows have lists of keys.
//
// Keys are striped across the splits: a stripe is as many neighbouring keys as there are splits, and each split owns
// one of them. So a split's keys are numbered by their stripes, a list's entry tells by itself whose it is, and a run
// of keys is divided evenly wherever it lies. Which of the stripe's keys a split owns is rotated from stripe to stripe
// by Fibonacci hashing: then keys at regular distances, the first keys of blocks for example, have different owners
// too.
#pragma once

#include <bit>
#include <cstdint>

namespace flash_dmattn::internal::cuda {

class Stripes {
 public:
  // Keys are less than 2^31, as are splits.
  constexpr explicit Stripes(std::int32_t splits = 1)
      : splits_(static_cast<std::uint32_t>(splits)), shift_(std::bit_width(splits_ - 1)) {
    factor_ = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + shift_)) - 1) / splits_ + 1);
  }

  // The stripe of a key: key / splits, exact for less than 2^31 because the factor is too large by less than
  // 2^shift / splits. Of twice the key, so that the upper half of the product is all that is asked for.
  constexpr std::uint32_t stripe_of(std::uint32_t key) const {
    return static_cast<std::uint32_t>(std::uint64_t{2 * key} * factor_ >> 32) >> shift_;
  }

  // The split's key in a stripe; in the last one there may be no such key.
  constexpr std::uint32_t key_of(std::int32_t split, std::uint32_t stripe) const {
    constexpr std::uint32_t kGoldenRatio = 0x9e3779b1;  // of 2^32
    const auto rotation = static_cast<std::uint32_t>(std::uint64_t{stripe * kGoldenRatio} * splits_ >> 32);
    const std::uint32_t place = static_cast<std::uint32_t>(split) + rotation;
    return stripe * splits_ + (place < splits_ ? place : place - splits_);
  }

  // How many keys less than `key` the split owns, which is also the stripe of its first key from there on.
  constexpr std::uint32_t count_below(std::int32_t split, std::uint32_t key) const {
    const std::uint32_t stripe = stripe_of(key);
    return stripe + (key_of(split, stripe) < key ? 1 : 0);
  }

 private:
  std::uint32_t splits_;
  int shift_;
  std::uint32_t factor_;  // key / splits is key * factor >> (31 + shift)
};

}  // namespace flash_dmattn::internal::cuda
