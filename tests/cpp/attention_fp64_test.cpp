// The fp64 path against the definition of attention, and its gradients against differences of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention_testing.h"

namespace flash_dmattn {
namespace {

using testing::Call;
using testing::SerialExecutor;
using testing::Tensor;
using testing::Variant;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// out and lse, straight from the definition.
struct Naive {
  Tensor out, lse;
  std::int64_t kept = 0;

  explicit Naive(const Call& call) : out(DType::kFloat64, call.dout.shape()), lse(DType::kFloat64, call.dlse.shape()) {
    const auto& q = call.query.shape();
    for (std::int64_t b = 0; b < q[0]; ++b) {
      for (std::int64_t h = 0; h < q[2]; ++h) {
        for (std::int64_t row = 0; row < q[1]; ++row) attend(call, b, h, row);
      }
    }
  }

 private:
  void attend(const Call& call, std::int64_t b, std::int64_t h, std::int64_t row) {
    const auto &q = call.query.shape(), &k = call.key.shape();
    const auto head_dim = static_cast<std::size_t>(q[3]), value_dim = static_cast<std::size_t>(call.value.shape()[3]);
    const auto query_row = static_cast<std::size_t>((b * q[1] + row) * q[2] + h);
    double sum = 0;
    std::vector<double> weighted(value_dim);
    for (std::int64_t j = 0; j < k[1]; ++j) {
      if (!call.visible(b, h, row, j)) continue;
      ++kept;
      const auto key_row = static_cast<std::size_t>((b * k[1] + j) * k[2] + h / (q[2] / k[2]));
      double score = 0;
      for (std::size_t d = 0; d < head_dim; ++d)
        score += call.query.get(query_row * head_dim + d) * call.key.get(key_row * head_dim + d);
      score *= *call.options.scale;
      if (const double cap = call.options.softcap; cap > 0) score = cap * std::tanh(score / cap);
      if (call.bias.defined()) score += call.bias.get(call.broadcast_index(call.bias, b, h, row, j));
      sum += std::exp(score);
      for (std::size_t d = 0; d < value_dim; ++d)
        weighted[d] += std::exp(score) * call.value.get(key_row * value_dim + d);
    }
    lse.set(static_cast<std::size_t>((b * q[2] + h) * q[1] + row), std::log(sum));
    const double whole = sum + (call.sink.defined() ? std::exp(call.sink.get(static_cast<std::size_t>(h))) : 0);
    for (std::size_t d = 0; d < value_dim; ++d) out.set(query_row * value_dim + d, sum > 0 ? weighted[d] / whole : 0);
  }
};

// The scalar whose gradient by every input is what the backward gives for these cotangents.
double loss(const Call& call) {
  const Naive naive(call);
  double sum = 0;
  for (std::size_t i = 0; i < naive.out.count(); ++i) sum += naive.out.get(i) * call.dout.get(i);
  for (std::size_t i = 0; i < naive.lse.count(); ++i) {
    if (naive.lse.get(i) != -kInfinity) sum += naive.lse.get(i) * call.dlse.get(i);
  }
  return sum;
}

void expect_gradient(const Call& call, Tensor Call::*input, const Tensor& gradient, const char* name) {
  // A float bias moves by steps that it represents.
  const double step = 1.0 / (1 << 12);
  ASSERT_EQ((call.*input).count(), gradient.count());
  for (std::size_t i = 0; i < gradient.count(); ++i) {
    Call above = call, below = call;
    (above.*input).set(i, (call.*input).get(i) + step);
    (below.*input).set(i, (call.*input).get(i) - step);
    const double expected = (loss(above) - loss(below)) / (2 * step);
    ASSERT_NEAR(gradient.get(i), expected, 1e-5 * std::max(1.0, std::fabs(expected))) << name << "[" << i << "]";
  }
}

class AttentionFloat64 : public ::testing::TestWithParam<Variant> {};

TEST_P(AttentionFloat64, IsTheDefinition) {
  Call call(GetParam(), DType::kFloat64);
  AttentionCounters counters;
  call.run({.counters = &counters});
  const Naive naive(call);
  for (std::size_t i = 0; i < call.out.count(); ++i) ASSERT_NEAR(call.out.get(i), naive.out.get(i), 1e-13) << i;
  for (std::size_t i = 0; i < call.lse.count(); ++i) {
    if (naive.lse.get(i) == -kInfinity) {
      ASSERT_EQ(call.lse.get(i), -kInfinity) << i;
    } else {
      ASSERT_NEAR(call.lse.get(i), naive.lse.get(i), 1e-13) << i;
    }
  }
  EXPECT_EQ(counters.kept_scores, 2 * naive.kept) << "forward and backward";
}

TEST_P(AttentionFloat64, GradientsAreDifferencesOfTheDefinition) {
  Call call(GetParam(), DType::kFloat64);
  call.run();
  expect_gradient(call, &Call::query, call.dquery, "dquery");
  expect_gradient(call, &Call::key, call.dkey, "dkey");
  expect_gradient(call, &Call::value, call.dvalue, "dvalue");
  if (call.bias.defined()) expect_gradient(call, &Call::bias, call.dbias, "dbias");
  if (call.sink.defined()) expect_gradient(call, &Call::sink, call.dsink, "dsink");
}

TEST_P(AttentionFloat64, UnseenNaNTouchesNothing) {
  Call clean(GetParam(), DType::kFloat64);
  Call poisoned = clean;
  testing::poison_unseen(&poisoned);
  clean.run();
  poisoned.run();
  testing::expect_same_bytes(clean, poisoned);
}

TEST_P(AttentionFloat64, IsTheSameForAnyNumberOfWorkers) {
  Call one(GetParam(), DType::kFloat64);
  Call many = one;
  SerialExecutor single(1), several(3);
  one.run({.executor = &single});
  many.run({.executor = &several});
  testing::expect_same_bytes(one, many);
}

const Variant kVariants[] = {
    {.name = "dense"},
    {.name = "causal_more_keys", .is_causal = true},
    {.name = "causal_more_rows", .shape = {1, 7, 4, 2, 1, 3}, .is_causal = true},
    {.name = "one_row", .shape = {2, 1, 6, 3, 1, 4}, .is_causal = true},
    {.name = "full_mask", .mask = {2, 4, 5, 7}, .density = 0.3},
    {.name = "full_mask_of_key_heads", .mask = {1, 2, 5, 7}, .bias = {2, 2, 5, 7}},
    {.name = "mask_per_row", .mask = {2, 1, 5, 1}, .bias = {2, 4, 5, 1}},
    {.name = "per_key", .mask = {2, 2, 7}, .bias = {2, 2, 7}},
    {.name = "rows_by_keys", .mask = {5, 7}, .bias = {5, 7}, .is_causal = true},
    {.name = "bias_for_all", .bias = {1, 1, 1, 1}},
    {.name = "bias_by_head", .bias = {1, 4, 1, 7}},
    {.name = "float_bias", .bias = {2, 1, 5, 7}, .float_bias = true},
    {.name = "lengths", .bias = {1, 1, 7}, .seqlens = {3, 9}, .is_causal = true},
    {.name = "no_length", .bias = {2, 4, 5, 7}, .seqlens = {0, -4}},
    {.name = "softcap", .bias = {2, 4, 5, 7}, .softcap = 1.5},
    {.name = "lists", .bias = {2, 4, 5, 7}, .indices = {2, 2, 5, 3}, .has_lengths = true},
    {.name = "lists_of_blocks", .mask = {2, 1, 7}, .is_causal = true, .indices = {1, 1, 5, 2}, .block_size = 3},
    {.name = "sink", .mask = {2, 4, 5, 7}, .bias = {2, 2, 1, 7}, .density = 0.2, .sink = true},
    {.name = "float_sink", .seqlens = {3, 0}, .is_causal = true, .softcap = 2, .float_sink = true},
    {.name = "narrow_values", .shape = {2, 5, 7, 4, 2, 3, 1}, .mask = {2, 4, 5, 7}, .bias = {2, 1, 1, 7}},
    {.name = "wide_values", .shape = {2, 5, 7, 4, 2, 3, 8}, .seqlens = {3, 9}, .is_causal = true},
    {.name = "nothing_visible", .mask = {1, 1, 1, 1}, .bias = {5, 7}, .density = 0},
};

INSTANTIATE_TEST_SUITE_P(Variants, AttentionFloat64, ::testing::ValuesIn(kVariants), testing::name_of_variant);

TEST(AttentionFloat64, BrokenScoresBreakTheirRowOnly) {
  for (const double bad : {kInfinity, std::nan("")}) {
    Call call({.name = "broken", .bias = {2, 4, 5, 7}}, DType::kFloat64);
    call.bias.set(0, bad);  // batch 0, head 0, row 0, key 0
    call.run();
    for (std::size_t i = 0; i < call.out.count(); ++i) EXPECT_EQ(std::isnan(call.out.get(i)), i < 3) << i;
    EXPECT_TRUE(std::isnan(call.lse.get(0)) || call.lse.get(0) == kInfinity);
    EXPECT_TRUE(std::isfinite(call.lse.get(1)));
    for (std::size_t i = 0; i < call.dquery.count(); ++i) EXPECT_EQ(std::isnan(call.dquery.get(i)), i < 3) << i;
    for (std::size_t i = 0; i < call.dbias.count(); ++i) EXPECT_EQ(std::isnan(call.dbias.get(i)), i < 7) << i;
    for (std::size_t i = 0; i < call.dvalue.count(); ++i) {  // of key head 0 in batch 0
      EXPECT_EQ(std::isnan(call.dvalue.get(i)), i < call.dvalue.count() / 2 && i / 3 % 2 == 0) << i;
    }
  }
}

TEST(AttentionFloat64, ABiasOfMinusInfinityHides) {
  Call call({.name = "hidden", .bias = {1, 1, 5, 7}}, DType::kFloat64);
  for (std::size_t j = 0; j < 7; ++j) call.bias.set(2 * 7 + j, -kInfinity);
  call.run();
  for (std::size_t row = 0; row < 5; ++row) {
    EXPECT_EQ(call.lse.get(row) == -kInfinity, row == 2);
    EXPECT_EQ(call.out.get(row * 4 * 3) == 0, row == 2);
    EXPECT_EQ(call.dquery.get(row * 4 * 3) == 0, row == 2);
  }
}

TEST(AttentionFloat64, ComputesOnlyTheGradientsAskedFor) {
  Call all({.name = "gradients", .bias = {1, 2, 1, 7}, .sink = true}, DType::kFloat64);
  all.run();
  for (int only = 0; only < 5; ++only) {
    Call call = all;
    call.make_results();
    ASSERT_TRUE(attention_forward(call.inputs(), call.options, call.outputs()).ok());
    AttentionGradients gradients;
    TensorView AttentionGradients::*const members[] = {&AttentionGradients::dquery, &AttentionGradients::dkey,
                                                       &AttentionGradients::dvalue, &AttentionGradients::dbias,
                                                       &AttentionGradients::dsink};
    gradients.*members[only] = call.gradients().*members[only];
    ASSERT_TRUE(attention_backward(call.inputs(), call.cotangents(), call.options, gradients).ok());
    const auto results = call.results(), expected = all.results();
    for (int i = 0; i < 5; ++i) {
      const auto at = static_cast<std::size_t>(i + 2);
      EXPECT_EQ(results[at].second->bytes() == expected[at].second->bytes(), i == only) << results[at].first;
    }
  }
}

}  // namespace
}  // namespace flash_dmattn
