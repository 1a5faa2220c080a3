// Decoding with lists of keys per row against attention in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

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
Lists uploaded(Lists lists) {
  lists.entries.upload();
  lists.views.entries = lists.entries.view;
  lists.views.block_size = 1;
  return lists;
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
