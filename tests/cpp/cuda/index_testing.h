// Lists of keys per row with entries of all kinds, on the host and on the device.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "plan_testing.h"

namespace flash_dmattn::internal::cuda {

struct Lists {
  Sizes sizes;
  Tensor<std::int32_t> entries, lengths;
  IndexViews views;

  // Entries of a row's list that count.
  std::int64_t count(std::int64_t b, std::int64_t h, std::int64_t row) {
    const std::int64_t all = entries.view.keys;
    return lengths.defined() ? std::clamp<std::int64_t>(lengths.at(b, h, row, 0), 0, all) : all;
  }
  // Whether the list of a row names a key.
  bool names(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t key) {
    const std::int64_t all = count(b, h, row);
    for (std::int64_t i = 0; i < all; ++i) {
      const std::int64_t begin = entries.at(b, h, row, i) * views.block_size;
      if (begin <= key && key < begin + views.block_size) return true;
    }
    return false;
  }
};

// Entries of all kinds: keys, the same keys again, -1, and what is outside of the keys, however far.
inline std::int32_t any_entry(Rng& rng, std::int64_t keys, std::int64_t block_size) {
  using Limits = std::numeric_limits<std::int32_t>;
  const auto blocks = static_cast<int>((keys - 1) / block_size + 1);
  switch (uniform(rng, 0, 9)) {
    case 0:
      return -1;
    case 1:
      return std::array{Limits::min(), Limits::max(), blocks, blocks + 1, -blocks}[rng() % 5];
    case 2:
      return blocks - 1;
    case 3: {  // where strips of keys may begin
      constexpr int kRound = 1024;
      return std::max(uniform(rng, 0, blocks / kRound) * kRound - uniform(rng, 0, 1), 0);
    }
    default:
      return uniform(rng, 0, blocks - 1);
  }
}

inline Lists random_lists(Rng& rng, const Sizes& sizes, int count, bool with_lengths, std::int64_t block_size) {
  const auto form = [&] { return std::array{uniform(rng, 0, 2), uniform(rng, 0, 3), uniform(rng, 0, 2), 1}; };
  const auto layout = [&] { return static_cast<Layout>(uniform(rng, 0, 3)); };
  Lists lists;
  lists.sizes = sizes;
  lists.entries =
      make_tensor<std::int32_t>(rng, {sizes.batch, sizes.heads, sizes.key_heads, sizes.rows, count}, form(), layout());
  for (std::int32_t& entry : lists.entries.host) entry = any_entry(rng, sizes.keys, block_size);
  if (count > 0) lists.entries.upload();
  lists.views.block_size = block_size;
  if (with_lengths) {
    auto lengths_form = form();
    lengths_form[3] = 0;
    lists.lengths = make_tensor<std::int32_t>(rng, sizes, lengths_form, layout());
    for (std::int32_t& length : lists.lengths.host) length = uniform(rng, -2, count + 2);
    lists.lengths.upload();
    lists.views.lengths = lists.lengths.view;
  }
  lists.views.entries = lists.entries.view;
  return lists;
}

}  // namespace flash_dmattn::internal::cuda
