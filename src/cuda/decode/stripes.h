// Which keys a split owns where rows have lists of keys.
//
// Keys are striped across the splits: a stripe is as many neighbouring keys as there are splits, and each split owns
// one of them. So a split's keys are numbered by their stripes, a list's entry tells by itself whose it is, and a run
// of keys is divided evenly wherever it lies. Which of the stripe's keys a split owns is rotated from stripe to stripe
// by Fibonacci hashing: then keys at regular distances, the first keys of blocks for example, have different owners
// too.
#pragma once

#include <cstdint>

#include "cuda/decode/divisor.h"

namespace flash_dmattn::internal::cuda {

class Stripes {
 public:
  // Keys are less than 2^31, as are splits.
  constexpr explicit Stripes(std::int32_t splits = 1) : splits_(splits) {}

  // The stripe of a key.
  constexpr std::uint32_t stripe_of(std::uint32_t key) const { return splits_.quotient(key); }

  // The split's key in a stripe; in the last one there may be no such key.
  constexpr std::uint32_t key_of(std::int32_t split, std::uint32_t stripe) const {
    constexpr std::uint32_t kGoldenRatio = 0x9e3779b1;  // of 2^32
    const std::uint32_t splits = splits_.value();
    const std::uint32_t place = static_cast<std::uint32_t>(split) + upper_product(stripe * kGoldenRatio, splits);
    // Of both, the one that is less than `splits`: the other one is larger, or has gone below 0.
    const std::uint32_t wrapped = place - splits;
    return stripe * splits + (place < wrapped ? place : wrapped);
  }

  // How many keys less than `key` the split owns, which is also the stripe of its first key from there on.
  constexpr std::uint32_t count_below(std::int32_t split, std::uint32_t key) const {
    const std::uint32_t stripe = stripe_of(key);
    return stripe + (key_of(split, stripe) < key ? 1 : 0);
  }

 private:
  Divisor splits_;
};

}  // namespace flash_dmattn::internal::cuda
