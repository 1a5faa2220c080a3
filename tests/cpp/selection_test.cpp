// Dynamic selection against the rule applied to every row by sorting, and attention over intervals against the
// same mask written out.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "attention_testing.h"
#include "core/thread_pool.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/plan.h"
#include "flash_dmattn/selection.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);  // fuzz_selection.cpp

namespace flash_dmattn {
namespace {

using testing::lowest_of;
using testing::Tensor;

struct Selection {
  std::int64_t batch = 2, heads = 2, rows = 20, keys = 20, window = 4;
  bool causal = true;
  DType dtype = DType::kFloat32;
  std::vector<std::int32_t> seqlens = {};
  bool masked = false;
};

struct Made {
  Tensor scores, mask, seqlens, begin, end;

  SelectionInputs inputs() const { return {scores.view(), mask.view(), seqlens.view()}; }
  KeyIntervals intervals() const { return {begin.view(), end.view()}; }
};

// Few distinct scores, so that there are ties everywhere, and all special values.
Made make(const Selection& s, std::mt19937& rng) {
  const double inf = HUGE_VAL, special[] = {std::nan(""), inf, -inf, lowest_of(s.dtype), 0.0, -0.0};
  Made made;
  made.scores = Tensor(s.dtype, {s.batch, s.heads, s.keys});
  made.scores.fill(
      [&] { return rng() % 5 == 0 ? special[rng() % 6] : static_cast<double>(static_cast<int>(rng() % 9) - 4) / 2; });
  if (s.masked) {
    made.mask = Tensor(DType::kBool, {1, s.heads, s.keys});
    made.mask.fill([&] { return rng() % 4 != 0 ? 1.0 : 0.0; });
  }
  if (!s.seqlens.empty()) {
    made.seqlens = Tensor(DType::kInt32, {s.batch});
    for (std::size_t b = 0; b < s.seqlens.size(); ++b) made.seqlens.set(b, s.seqlens[b]);
  }
  made.begin = made.end = Tensor(DType::kInt32, {s.batch, s.heads, s.keys});
  return made;
}

bool outranks(double a, std::int64_t a_key, double b, std::int64_t b_key) {
  if (std::isnan(a) != std::isnan(b)) return std::isnan(a);
  if (!std::isnan(a) && a != b) return a > b;
  return a_key > b_key;
}

std::vector<bool> keys_of_row(const Selection& s, const Made& made, std::int64_t b, std::int64_t h, std::int64_t row) {
  const std::int64_t n =
      s.seqlens.empty() ? s.keys : std::clamp<std::int64_t>(s.seqlens[static_cast<std::size_t>(b)], 0, s.keys);
  const auto score = [&](std::int64_t key) {
    return made.scores.get(static_cast<std::size_t>((b * s.heads + h) * s.keys + key));
  };
  std::vector<std::int64_t> candidates;
  for (std::int64_t key = 0; key < n; ++key) {
    if (s.causal && key > row + n - s.rows) continue;
    if (s.masked && made.mask.get(static_cast<std::size_t>(h * s.keys + key)) == 0) continue;
    if (score(key) <= lowest_of(s.dtype)) continue;
    candidates.push_back(key);
  }
  std::sort(candidates.begin(), candidates.end(),
            [&](std::int64_t x, std::int64_t y) { return outranks(score(x), x, score(y), y); });
  std::vector<bool> kept(static_cast<std::size_t>(s.keys));
  for (std::size_t i = 0; i < candidates.size() && i < static_cast<std::size_t>(s.window); ++i) {
    kept[static_cast<std::size_t>(candidates[i])] = true;
  }
  return kept;
}

TEST(Selection, IsTheRuleAppliedToEveryRow) {
  std::mt19937 rng(1);
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};
  for (int round = 0; round < 2000; ++round) {
    Selection s;
    s.rows = static_cast<std::int64_t>(rng() % 30);
    s.keys = 1 + static_cast<std::int64_t>(rng() % 40);
    s.window = round % 7 == 0 ? 0 : round % 11 == 0 ? 100 : 1 + static_cast<std::int64_t>(rng() % 12);
    s.causal = rng() % 3 != 0;
    s.dtype = dtypes[round % 4];
    s.masked = rng() % 2 == 0;
    if (rng() % 3 == 0) s.seqlens = {static_cast<std::int32_t>(rng() % 45) - 2, 7};
    const Made made = make(s, rng);
    internal::ThreadPool pool(1 + round % 3);
    const Status status = select_keys(made.inputs(), {s.window, s.rows, s.causal}, made.intervals(), {&pool});
    ASSERT_TRUE(status.ok()) << status.message();
    for (std::int64_t b = 0; b < s.batch; ++b) {
      for (std::int64_t h = 0; h < s.heads; ++h) {
        for (std::int64_t row = 0; row < s.rows; ++row) {
          const std::vector<bool> expected = keys_of_row(s, made, b, h, row);
          for (std::int64_t key = 0; key < s.keys; ++key) {
            const auto at = static_cast<std::size_t>((b * s.heads + h) * s.keys + key);
            const bool visible = row >= made.begin.get(at) && row < made.end.get(at);
            ASSERT_EQ(visible, expected[static_cast<std::size_t>(key)])
                << "round " << round << " b " << b << " h " << h << " row " << row << " key " << key << " w "
                << s.window;
          }
        }
      }
    }
  }
}

TEST(Selection, KeysThatNobodySeesHaveOneForm) {
  std::mt19937 rng(2);
  const Selection s{.rows = 30, .keys = 30, .window = 3};
  const Made made = make(s, rng);
  ASSERT_TRUE(select_keys(made.inputs(), {s.window, s.rows, true}, made.intervals()).ok());
  for (std::size_t i = 0; i < made.begin.count(); ++i) {
    if (made.begin.get(i) >= made.end.get(i)) {
      EXPECT_EQ(made.begin.get(i), 0);
      EXPECT_EQ(made.end.get(i), 0);
    }
  }
}

TEST(Selection, EqualScoresMakeASlidingWindow) {
  Selection s{.batch = 1, .heads = 1, .rows = 50, .keys = 50, .window = 8};
  std::mt19937 rng(3);
  Made made = make(s, rng);
  made.scores.fill([] { return 1.0; });
  ASSERT_TRUE(select_keys(made.inputs(), {s.window, s.rows, true}, made.intervals()).ok());
  for (std::size_t key = 0; key < 50; ++key) {
    EXPECT_EQ(made.begin.get(key), static_cast<double>(key));
    EXPECT_EQ(made.end.get(key), std::min(50.0, static_cast<double>(key + 8)));
  }
}

TEST(Selection, RefusesBadArguments) {
  std::mt19937 rng(4);
  const Selection s;
  const Made made = make(s, rng);
  const auto argument_of = [&](SelectionInputs inputs, SelectionOptions options, KeyIntervals intervals) {
    return select_keys(inputs, options, intervals).argument();
  };
  const SelectionOptions options{s.window, s.rows, true};
  EXPECT_EQ(argument_of(made.inputs(), options, made.intervals()), "");
  EXPECT_EQ(argument_of({}, options, made.intervals()), "scores");
  EXPECT_EQ(argument_of(made.inputs(), {-1, s.rows, true}, made.intervals()), "window_size");
  EXPECT_EQ(argument_of(made.inputs(), {1, -1, true}, made.intervals()), "seqlen_q");
  EXPECT_EQ(argument_of(made.inputs(), options, {}), "intervals.begin");
  EXPECT_EQ(argument_of(made.inputs(), options, {made.begin.view(), made.scores.view()}), "intervals.end");
  SelectionInputs inputs = made.inputs();
  inputs.key_mask = made.scores.view();
  EXPECT_EQ(argument_of(inputs, options, made.intervals()), "key_mask");
  inputs = made.inputs();
  inputs.seqlens_k = made.begin.view();
  EXPECT_EQ(argument_of(inputs, options, made.intervals()), "seqlens_k");
  EXPECT_EQ(select_keys(made.inputs(), options, made.intervals(), nullptr, 0).argument(), "workspace");
}

// Where a size is 0 there may be no memory, whatever the strides say. (Only Clang's sanitizer sees what is added to
// null.)
TEST(Selection, TensorsWithoutElementsNeedNoMemory) {
  TensorView scores = contiguous_view(nullptr, DType::kFloat32, 2, 3, 0);
  scores.strides = {7, 5, 3, 0};
  const TensorView none = contiguous_view(nullptr, DType::kInt32, 2, 3, 0);
  EXPECT_EQ(select_keys({scores}, {4, 10, true}, {none, none}).message(), "ok");

  constexpr std::int64_t kKeys = 5000;  // strips of keys are looked at one by one
  TensorView mask = contiguous_view(nullptr, DType::kBool, 2, 1, 0, kKeys);
  mask.strides = {7, 5, 3, 1};
  Tensor begin(DType::kInt32, {2, 1, kKeys}), end = begin;
  for (Tensor* bound : {&begin, &end}) bound->fill([] { return 7.0; });
  bool exact = false;
  EXPECT_EQ(mask_intervals(mask, false, {begin.view(), end.view()}, &exact).message(), "ok");
  EXPECT_TRUE(exact);
  for (std::size_t key = 0; key < begin.count(); ++key) {
    EXPECT_EQ(begin.get(key), 0);
    EXPECT_EQ(end.get(key), 0);
  }
}

// Also of packed documents, kept keys and masks.
TEST(Selection, ArbitraryCallsFollowTheRules) {
  std::mt19937 random(11);
  std::vector<std::uint8_t> bytes(512);
  for (int i = 0; i < 20000; ++i) {
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());  // aborts where something is wrong
  }
}

// Attention with intervals (and maybe a mask) and with the mask that says the same.
class IntervalAttention : public ::testing::TestWithParam<std::tuple<DType, bool, bool>> {};

TEST_P(IntervalAttention, EqualsTheDenseMask) {
  const auto [dtype, causal, with_mask] = GetParam();
  std::mt19937 rng(5);
  const auto random = [&] { return static_cast<double>(static_cast<int>(rng() % 65) - 32) / 32; };
  constexpr std::int64_t kBatch = 2, kRows = 300, kKeys = 700, kHeads = 4, kKeyHeads = 2, kDim = 24;
  const DType lse_dtype = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  Tensor query(dtype, {kBatch, kRows, kHeads, kDim}), key(dtype, {kBatch, kKeys, kKeyHeads, kDim});
  Tensor value = key, dout = query, bias(dtype, {kBatch, kKeyHeads, kKeys}), seqlens(DType::kInt32, {kBatch});
  for (Tensor* tensor : {&query, &key, &value, &dout, &bias}) tensor->fill(random);
  seqlens.set(0, kKeys);
  seqlens.set(1, 555);

  Tensor begin(DType::kInt32, {1, kKeyHeads, kKeys}), end = begin;
  for (std::size_t i = 0; i < begin.count(); ++i) {
    begin.set(i, static_cast<double>(rng() % (kRows + 40)) - 20);
    end.set(i, begin.get(i) - 30 + static_cast<double>(rng() % 250));
  }
  Tensor mask(DType::kBool, {kBatch, 1, kRows, kKeys}), dense(DType::kBool, {kBatch, kKeyHeads, kRows, kKeys});
  mask.fill([&] { return rng() % 3 != 0 ? 1.0 : 0.0; });
  for (std::size_t i = 0; i < dense.count(); ++i) {
    const std::size_t j = i % kKeys, row = i / kKeys % kRows, h = i / (kKeys * kRows) % kKeyHeads,
                      b = i / (kKeys * kRows * kKeyHeads);
    const double at = static_cast<double>(row);
    const bool seen = at >= begin.get(h * kKeys + j) && at < end.get(h * kKeys + j);
    dense.set(i, seen && (!with_mask || mask.get((b * kRows + row) * kKeys + j) != 0) ? 1.0 : 0.0);
  }

  struct Results {
    Tensor out, lse, dquery, dkey, dvalue, dbias;
  };
  const auto run = [&](bool by_intervals) {
    AttentionInputs inputs;
    inputs.query = query.view();
    inputs.key = key.view();
    inputs.value = value.view();
    inputs.bias = bias.view();
    inputs.visibility.seqlens_k = seqlens.view();
    if (by_intervals) inputs.visibility.intervals = {begin.view(), end.view()};
    if (!by_intervals || with_mask) inputs.visibility.mask = by_intervals ? mask.view() : dense.view();
    Results r{query, Tensor(lse_dtype, {kBatch, kHeads, kRows}), query, key, value, bias};
    AttentionOptions options;
    inputs.visibility.is_causal = causal;
    AttentionCounters counted;
    EXPECT_TRUE(attention_forward(inputs, options, {r.out.view(), r.lse.view()}, {.counters = &counted}).ok());
    PlanReport report;
    EXPECT_TRUE(plan_report(inputs, options, &report).ok());
    testing::expect_same_counters(report.counters, counted);
    EXPECT_TRUE(attention_backward(inputs, {r.out.view(), r.lse.view(), dout.view(), {}}, options,
                                   {r.dquery.view(), r.dkey.view(), r.dvalue.view(), r.dbias.view()})
                    .ok());
    return r;
  };
  const Results got = run(true), expected = run(false);
  // The keys of a sum come in another order: results differ by roundings.
  const double tolerance = dtype == DType::kFloat64 ? 1e-12 : dtype == DType::kFloat32 ? 2e-5 : 4e-2;
  const auto expect_close = [&](const char* name, const Tensor& a, const Tensor& b) {
    double largest = 0, difference = 0;
    for (std::size_t i = 0; i < a.count(); ++i) {
      if (std::isinf(b.get(i)) || std::isinf(a.get(i))) {
        ASSERT_EQ(a.get(i), b.get(i)) << name << " " << i;
        continue;
      }
      largest = std::max(largest, std::fabs(b.get(i)));
      difference = std::max(difference, std::fabs(a.get(i) - b.get(i)));
    }
    EXPECT_LE(difference, tolerance * largest) << name;
  };
  expect_close("out", got.out, expected.out);
  expect_close("lse", got.lse, expected.lse);
  expect_close("dquery", got.dquery, expected.dquery);
  expect_close("dkey", got.dkey, expected.dkey);
  expect_close("dvalue", got.dvalue, expected.dvalue);
  expect_close("dbias", got.dbias, expected.dbias);
}

INSTANTIATE_TEST_SUITE_P(Forms, IntervalAttention,
                         ::testing::Combine(::testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                                                              DType::kFloat64),
                                            ::testing::Bool(), ::testing::Bool()));

}  // namespace
}  // namespace flash_dmattn
