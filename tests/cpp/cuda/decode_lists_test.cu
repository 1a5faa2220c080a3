// Decoding with lists of keys per row against attention in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cuda/decode/config.h"
#include "cuda/decode/stripes.h"
#include "decode_testing.h"

namespace flash_dmattn::internal::cuda {
namespace {

class RandomDecodeLists : public testing::TestWithParam<int> {};

TEST_P(RandomDecodeLists, AgreeWithDoublePrecision) { expect_agreement(GetParam(), true); }

INSTANTIATE_TEST_SUITE_P(Seeds, RandomDecodeLists, testing::Range(0, 32));

// Lists of any keys, of a form as make_tensor has it.
Lists plain_lists(Rng& rng, const Sizes& sizes, std::array<int, 4> form, std::int64_t count) {
  Lists lists;
  lists.sizes = sizes;
  lists.entries = make_tensor<std::int32_t>(rng, {sizes.batch, sizes.heads, sizes.key_heads, sizes.rows, count}, form,
                                            Layout::kContiguous);
  for (std::int32_t& entry : lists.entries.host) entry = uniform(rng, -1, static_cast<int>(sizes.keys) + 10);
  return lists;
}

// With these entries.
Lists uploaded(Lists lists, std::int64_t block_size = 1) {
  lists.entries.upload();
  lists.views.entries = lists.entries.view;
  lists.views.block_size = block_size;
  return lists;
}

// The number of splits that a call gets, by the room that it asks for.
std::int32_t splits_of(const Case& c) {
  const Sizes& sizes = c.problem.sizes;
  const std::size_t bytes = decode_workspace(shapes_of(c), c.gpu());
  std::int32_t splits = 1;
  while (decode_partial_bytes(sizes.batch * sizes.heads * sizes.rows, {splits}, c.head_dim) < bytes) ++splits;
  return splits;
}

// Every key has one owner, and a split's keys are numbered by their stripes.
TEST(Stripes, DivideKeys) {
  constexpr std::uint32_t kMostKeys = 0x7fffffff;
  for (const std::int32_t splits : {1, 2, 3, 4, 5, 6, 7, 8, 33, 64, 100, 1583, 65537}) {
    const Stripes stripes(splits);
    for (std::uint32_t begin : {0u, 65536u - 10, 12345678u, kMostKeys - 300}) {
      for (std::uint32_t key = begin; key < begin + 300; ++key) {
        ASSERT_EQ(stripes.stripe_of(key), key / static_cast<std::uint32_t>(splits));
        int owners = 0;
        for (std::int32_t split = 0; split < splits; ++split) {
          const std::uint32_t below = stripes.count_below(split, key);
          ASSERT_TRUE(below == 0 || stripes.key_of(split, below - 1) < key);
          ASSERT_GE(stripes.key_of(split, below), key);
          const bool owns = stripes.key_of(split, stripes.stripe_of(key)) == key;
          ASSERT_EQ(stripes.count_below(split, key + 1), below + (owns ? 1 : 0));
          owners += owns ? 1 : 0;
        }
        ASSERT_EQ(owners, 1) << key << " of " << splits;
      }
    }
  }
}

// Keys that are neighbours, or at regular distances, are divided about evenly.
TEST(Stripes, DivideRegularKeysEvenly) {
  constexpr std::int64_t kKeys = 65536, kListed = 2048;
  for (std::int32_t splits = 2; splits <= 8; ++splits) {
    const Stripes stripes(splits);
    const auto most = [&](std::int64_t first, std::int64_t step) {
      std::vector<std::int64_t> counts(static_cast<std::size_t>(splits));
      for (std::int64_t key = first; key < std::min(first + kListed * step, kKeys); key += step) {
        for (std::int32_t split = 0; split < splits; ++split) {
          const auto own = static_cast<std::uint32_t>(key);
          counts[static_cast<std::size_t>(split)] += stripes.key_of(split, stripes.stripe_of(own)) == own ? 1 : 0;
        }
      }
      return *std::max_element(counts.begin(), counts.end());
    };
    for (const std::int64_t first : {0, 5, 40001, 65536 - 2048}) EXPECT_LE(most(first, 1), kListed / splits + 2);
    for (std::int64_t step = 2; step <= 1024; step *= 2) {
      const std::int64_t keys = std::min(kListed, kKeys / step);
      EXPECT_LE(most(0, step), keys / splits * 5 / 4 + 2) << step << ", " << splits;
      EXPECT_LE(most(0, step * splits), keys / splits * 5 / 4 + 2) << step << " stripes, " << splits;
    }
  }
}

// What one list names does not depend on its order, on repeats and on entries that name nothing: the bits stay.
TEST(DecodeLists, OrderAndRepeatsDoNotMatter) {
  Rng rng(12);
  const Sizes sizes = {1, 4, 2, 2, 3000};
  Case c = plain_case(rng, DType::kBFloat16, sizes, 64, 0.125);
  c.processors = 8;
  const auto lists_of = [&](const std::vector<std::int32_t>& entries) {
    Lists lists = plain_lists(rng, sizes, {0, 0, 0, 1}, static_cast<std::int64_t>(entries.size()));
    lists.entries.host = entries;
    return uploaded(std::move(lists));
  };
  std::vector<std::int32_t> entries(700);
  for (std::int32_t& entry : entries) entry = uniform(rng, 0, 2999);
  std::sort(entries.begin(), entries.end());
  entries.erase(std::unique(entries.begin(), entries.end()), entries.end());
  c.take_lists(lists_of(entries));
  const Result sorted = run(c, false);
  compare(c, sorted);
  const auto keys = static_cast<std::int64_t>(entries.size());
  // As many again, so that the number of splits does not change: that follows the number of entries.
  for (int i = 0; i < 5; ++i) {
    std::vector<std::int32_t> others = entries;
    std::shuffle(others.begin(), others.end(), rng);
    c.take_lists(lists_of(others));
    const Result result = run(c, false);
    EXPECT_EQ(result.out, sorted.out);
    EXPECT_EQ(result.lse, sorted.lse);
    for (std::int64_t j = 0; j < keys; ++j) others.push_back(j % 3 == 0 ? -1 : others[static_cast<std::size_t>(j)]);
    std::shuffle(others.begin(), others.end(), rng);
    c.take_lists(lists_of(others));
    compare(c, run(c, false));
    if (testing::Test::HasFatalFailure()) return;
  }
}

// More keys than a round finds, in one split and in several, in lists of the rows' own.
TEST(DecodeLists, MoreKeysThanARoundFinds) {
  for (const int head_dim : {64, 256}) {
    for (const int by_row : {0, 1}) {
      Rng rng(13);
      const Sizes sizes = {1, 2, 1, 2, 5000};
      Case c = plain_case(rng, DType::kFloat16, sizes, head_dim, 0.1);
      c.processors = by_row;
      c.take_lists(uploaded(plain_lists(rng, sizes, {0, by_row, by_row, 1}, 4000)));
      c.poison();
      compare(c, run(c, false));
      if (HasFatalFailure()) return;
    }
  }
}

// All keys of one split, for which the others have no work: more than a round finds, and a few.
TEST(DecodeLists, KeysOfOneSplit) {
  for (const int by_row : {0, 1}) {
    for (const int count : {2000, 300}) {
      Rng rng(16);
      const Sizes sizes = {1, 2, 1, 2, 9000};
      Case c = plain_case(rng, DType::kBFloat16, sizes, 64, 0.125);
      c.processors = 2;
      c.take_lists(uploaded(plain_lists(rng, sizes, {0, 0, by_row, 1}, count)));
      const std::int32_t splits = splits_of(c);
      ASSERT_GT(splits, 2);
      const Stripes stripes(splits);
      const std::uint32_t whole = stripes.stripe_of(9000);  // stripes of which all keys exist
      for (const std::int32_t split : {0, splits - 1}) {
        std::uint32_t i = 0;  // lists with more entries than the split has keys name all of them, and some again
        for (std::int32_t& entry : c.lists.entries.host) {
          const std::uint32_t stripe = count > 1000 ? i++ % whole : static_cast<std::uint32_t>(rng()) % whole;
          entry = static_cast<std::int32_t>(stripes.key_of(split, stripe));
        }
        c.take_lists(uploaded(std::move(c.lists)));
        const Result result = run(c, false);
        compare(c, result);
        EXPECT_EQ(run(c, false).out, result.out);
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Keys and blocks at regular distances, of which splits own some keys, many or none.
TEST(DecodeLists, StridesAndBlocks) {
  for (const int by_row : {0, 1}) {
    for (const std::int64_t block_size : {1, 2, 16, 64, 128, 1000}) {
      for (const int step : {1, 2, 6, 16}) {
        Rng rng(17);
        const Sizes sizes = {1, 2, 1, 2, 4100};
        Case c = plain_case(rng, DType::kFloat16, sizes, 32, 0.2);
        c.processors = 8;
        const auto blocks = static_cast<int>((sizes.keys - 1) / block_size + 1);
        Lists lists = plain_lists(rng, sizes, {0, 0, by_row, 1}, (blocks - 1) / step + 1);
        const std::int64_t count = lists.entries.view.keys;
        for (std::size_t i = 0; i < lists.entries.host.size(); ++i) {
          lists.entries.host[i] = static_cast<std::int32_t>(static_cast<std::int64_t>(i) % count * step);
        }
        c.take_lists(uploaded(std::move(lists), block_size));
        c.poison();
        SCOPED_TRACE("block size " + std::to_string(block_size) + " step " + std::to_string(step));
        compare(c, run(c, false));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// More keys than a range has, some so far from each other that 16 bits do not hold it.
TEST(DecodeLists, LongCaches) {
  for (const int by_row : {0, 1}) {
    Rng rng(14);
    const Sizes sizes = {1, 2, 1, 3, 300001};
    Case c = plain_case(rng, DType::kFloat16, sizes, 32, 0.2);
    c.processors = 2 * by_row;
    Lists lists = plain_lists(rng, sizes, {0, 0, by_row, 1}, 600);
    for (std::size_t i = 0; i < lists.entries.host.size(); i += 3) lists.entries.host[i] = uniform(rng, 131000, 131200);
    lists.entries.host[1] = 0, lists.entries.host[4] = 300000;
    c.take_lists(uploaded(std::move(lists)));
    c.poison();
    compare(c, run(c, false));
    if (HasFatalFailure()) return;
  }
}

// Keys about the diagonal, which rows with one list do not see alike; with fewer keys than rows, too.
TEST(DecodeLists, CausalRule) {
  Rng rng(15);
  for (const int by_row : {0, 1}) {
    for (const int keys : {7, 60}) {
      const Sizes sizes = {2, 2, 1, 12, keys};
      Case c = plain_case(rng, DType::kBFloat16, sizes, 64, 0.125);
      c.processors = by_row;
      c.problem.causal = true;
      c.problem.seqlens = {keys, keys / 2};
      c.problem.upload();
      c.take_lists(uploaded(plain_lists(rng, sizes, {1, 0, by_row, 1}, 2 * keys)));
      c.poison();
      compare(c, run(c, false));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(DecodeLists, ApplyIfShort) {
  AttentionProblem problem;
  problem.batch = 8, problem.rows = 16, problem.keys = 65536, problem.heads = 32, problem.key_heads = 8;
  problem.head_dim = 128;
  problem.visibility.indices.block_size = 1;
  BroadcastView& entries = problem.visibility.indices.entries;
  entries.rows = 16, entries.keys = 4096, entries.row_stride = 4096;
  EXPECT_TRUE(decode_applies(problem));
  entries.keys = 4097;
  EXPECT_FALSE(decode_applies(problem));
  entries.rows = 1, entries.row_stride = 0;
  EXPECT_TRUE(decode_applies(problem));
  problem.visibility.mask.rows = 16, problem.visibility.mask.row_stride = 65536;  // asked for listed keys alone
  EXPECT_TRUE(decode_applies(problem));
  problem.keys = 16;
  EXPECT_FALSE(decode_applies(problem));
}

}  // namespace
}  // namespace flash_dmattn::internal::cuda
