// Decoding on the device against attention in double precision.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <string>

#include "decode_testing.h"

namespace flash_dmattn::internal::cuda {
namespace {

class RandomDecode : public testing::TestWithParam<int> {};

TEST_P(RandomDecode, AgreesWithDoublePrecision) { expect_agreement(GetParam(), false); }

INSTANTIATE_TEST_SUITE_P(Seeds, RandomDecode, testing::Range(0, 16));

// A visible key that holds NaN or inf shows in the rows that see it, and only there.
TEST(Decode, NonFiniteKeysShow) {
  for (const double poison : {kNaN, kInfinity}) {
    Rng rng(7);
    Case c = plain_case(rng, DType::kBFloat16, {2, 4, 2, 1, 1000}, 64, 0.125);
    c.processors = 132;
    c.key.at(1, 700, 1, 5) = c.numbers.bits(poison);
    for (int h = 2; h < 4; ++h) c.query.at(1, 0, h, 5) = c.numbers.bits(1);
    const Result result = run(c, false);
    for (int b = 0; b < 2; ++b)
      for (int h = 0; h < 4; ++h) {
        const bool hit = b == 1 && h >= 2;
        EXPECT_EQ(std::isfinite(result.lse[static_cast<std::size_t>(b * 4 + h)]), !hit);
        for (int d = 0; d < 64; ++d) {
          const double out = c.numbers.value(result.out[static_cast<std::size_t>((b * 4 + h) * 64 + d)]);
          EXPECT_EQ(std::isnan(out), hit) << b << h << d;
        }
      }
  }
}

// Up to 8 rows of a key head are columns of products, more are their rows; a block has at most 16. Heads of a group
// see different keys.
TEST(Decode, EveryNumberOfRows) {
  constexpr int kHeadDims[] = {32, 64, 96, 128, 192, 256};
  Rng rng(13);
  for (int group = 1; group <= 18; ++group) {
    const int head_dim = kHeadDims[group % 6];
    Case c = plain_case(rng, group % 2 == 0 ? DType::kBFloat16 : DType::kFloat16, {1, group, 1, 1, 300}, head_dim, 0.1);
    c.processors = group % 3 == 0 ? 1 : 132;
    c.problem.mask = make_mask(rng, c.problem.sizes, {0, 1, 0, 1}, Layout::kContiguous, 30);
    c.poison();
    SCOPED_TRACE(std::to_string(group) + " rows");
    compare(c, run(c, false));
  }
}

// The last keys of a long split: listed keys are 16 bits.
TEST(Decode, LongSplits) {
  Rng rng(11);
  Case c = plain_case(rng, DType::kFloat16, {1, 1, 1, 1, 140001}, 32, 0.2);
  c.processors = 0;  // as few splits as listed keys allow
  c.problem.mask = make_mask(rng, c.problem.sizes, {0, 0, 0, 1}, Layout::kContiguous, 30);
  c.poison();
  compare(c, run(c, false));
}

// Splits that are a cluster leave nothing in global memory. All keys are never a cluster's, nor are those of a mask
// where it would leave multiprocessors with less than they have room for, as it may show all.
TEST(Decode, ClustersNeedNoWorkspace) {
  AttentionProblem problem;
  problem.rows = 1, problem.keys = 65536, problem.heads = 32, problem.key_heads = 8, problem.head_dim = 128;
  std::int32_t entries[1] = {};
  bool mask[1] = {};
  const auto bytes = [&](std::int64_t batch, bool has_clusters) {
    problem.batch = batch;
    return decode_workspace(problem, {132, has_clusters});
  };
  EXPECT_GT(bytes(8, true), 0u);
  EXPECT_EQ(bytes(8, true), bytes(8, false));
  problem.visibility.mask.data = mask, problem.visibility.mask.keys = problem.keys;
  for (const std::int64_t batch : {1, 4, 8, 16}) {
    EXPECT_GT(bytes(batch, false), 0u);
    EXPECT_EQ(bytes(batch, true) == 0, batch >= 8) << batch;
  }
  problem.visibility.mask = {};
  problem.visibility.indices.entries.data = entries, problem.visibility.indices.entries.keys = 2048;
  problem.visibility.indices.block_size = 1;
  for (const std::int64_t batch : {1, 4, 8, 16}) {
    EXPECT_GT(bytes(batch, false), 0u);
    EXPECT_EQ(bytes(batch, true), 0u) << batch;
  }
}

TEST(Decode, AppliesToFewRowsAndManyKeys) {
  AttentionProblem problem;
  problem.batch = 8, problem.rows = 1, problem.keys = 65536, problem.heads = 32, problem.key_heads = 8;
  problem.head_dim = 128;
  EXPECT_TRUE(decode_applies(problem));
  problem.rows = 128;
  EXPECT_FALSE(decode_applies(problem));
  problem.rows = 1, problem.keys = 16;
  EXPECT_FALSE(decode_applies(problem));
  problem.keys = 65536;
  problem.visibility.mask.row_stride = 65536;
  EXPECT_TRUE(decode_applies(problem));
  problem.rows = 8;
  EXPECT_FALSE(decode_applies(problem));
}

}  // namespace
}  // namespace flash_dmattn::internal::cuda
