// Plans written out, plans that are kept, and the intervals of dense masks, against the rules written out score by
// score. That a report tells what a call then does is tested with the calls (attention_test.cpp, selection_test.cpp).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "attention_testing.h"
#include "flash_dmattn/info.h"
#include "flash_dmattn/plan.h"

namespace flash_dmattn {
namespace {

using testing::Call;
using testing::SerialExecutor;
using testing::Tensor;
using testing::Variant;

const std::vector<Variant> kVariants = {
    {.name = "dense", .shape = {2, 33, 65, 4, 2, 32}},
    {.name = "causal", .shape = {1, 300, 333, 2, 1, 16}, .is_causal = true},
    {.name = "lengths", .shape = {3, 40, 131, 4, 1, 16}, .seqlens = {131, 64, 0}, .is_causal = true},
    {.name = "mask", .shape = {2, 170, 90, 4, 2, 24}, .mask = {2, 4, 170, 90}, .density = 0.1},
    {.name = "sparse_mask", .shape = {1, 200, 300, 2, 1, 16}, .mask = {200, 300}, .density = 0.004},
    {.name = "per_key", .shape = {2, 70, 90, 4, 2, 24}, .mask = {2, 2, 90}, .is_causal = true},
};

class PlannedChunks : public ::testing::TestWithParam<Variant> {};

TEST_P(PlannedChunks, ShowWhatTheRulesShow) {
  const Call call(GetParam(), DType::kFloat32);
  AttentionInputs inputs = call.inputs();
  inputs.value = {};
  const std::int64_t rows = call.query.shape()[1], keys = call.key.shape()[1];
  for (std::int64_t batch = 0; batch < call.query.shape()[0]; ++batch) {
    for (std::int64_t head = 0; head < call.query.shape()[2]; ++head) {
      std::vector<PlannedChunk> chunks;
      ASSERT_EQ(plan_chunks(inputs, call.options, batch, head, &chunks).message(), "ok");
      std::int64_t next_row = 0;
      for (const PlannedChunk& chunk : chunks) {
        ASSERT_EQ(chunk.row_begin, next_row);
        next_row += chunk.rows;
        ASSERT_EQ(chunk.visible.size(), static_cast<std::size_t>(chunk.rows) * chunk.keys.size());
        std::vector<std::uint8_t> planned(static_cast<std::size_t>(chunk.rows * keys));
        for (std::size_t i = 0; i < chunk.visible.size(); ++i) {
          const std::size_t row = i / chunk.keys.size(),
                            key = static_cast<std::size_t>(chunk.keys[i % chunk.keys.size()]);
          planned[row * static_cast<std::size_t>(keys) + key] = chunk.visible[i];
        }
        for (std::int64_t i = 0; i < chunk.rows * keys; ++i) {
          ASSERT_EQ(planned[static_cast<std::size_t>(i)] != 0,
                    call.visible(batch, head, chunk.row_begin + i / keys, i % keys))
              << "row " << chunk.row_begin + i / keys << ", key " << i % keys;
        }
        const bool neighbours =
            chunk.keys.empty() || chunk.keys.back() - chunk.keys.front() + 1 == std::ssize(chunk.keys);
        EXPECT_EQ(chunk.is_list, !neighbours);
        const auto tiles = [](std::int64_t size, int tile) { return (size + tile - 1) / tile; };
        EXPECT_EQ(std::ssize(chunk.tiles),
                  tiles(chunk.rows, chunk.row_tile) * tiles(std::ssize(chunk.keys), chunk.key_tile));
      }
      EXPECT_EQ(next_row, rows);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, PlannedChunks, ::testing::ValuesIn(kVariants), testing::name_of_variant);

std::string argument_of(const Status& status) { return status.argument(); }

TEST(Plans, RefuseBadArguments) {
  const Call call(kVariants[1], DType::kFloat32);
  const AttentionInputs inputs = call.inputs();
  std::vector<PlannedChunk> chunks;
  PlanReport report;
  EXPECT_EQ(argument_of(plan_report({}, {}, &report)), "query");
  EXPECT_EQ(argument_of(plan_chunks(inputs, {}, 1, 0, &chunks)), "batch");
  EXPECT_EQ(argument_of(plan_chunks(inputs, {}, 0, -1, &chunks)), "head");
  const Call precise = call.in_float64();
  EXPECT_EQ(argument_of(plan_chunks(precise.inputs(), {}, 0, 0, &chunks)), "query");
  bool exact = false;
  EXPECT_EQ(argument_of(mask_intervals(inputs.query, false, {}, &exact)), "mask");
}

// A query and a key of these sizes, expanded from one element.
AttentionInputs expanded_inputs(DType dtype, const testing::Shape& s) {
  static const double element = 0;
  AttentionInputs inputs;
  inputs.query = contiguous_view(&element, dtype, s.batch, s.rows, s.heads, s.head_dim);
  inputs.key = contiguous_view(&element, dtype, s.batch, s.keys, s.key_heads, s.head_dim);
  for (TensorView* view : {&inputs.query, &inputs.key}) view->strides = {0, 0, 0, 1};
  inputs.value = inputs.key;
  return inputs;
}

TEST(Plans, OfTooManyHeadsAreRefused) {
  PlanReport report;
  std::vector<PlannedChunk> chunks;
  for (const std::int64_t heads : {std::int64_t{65537}, std::int64_t{1} << 31, std::int64_t{1} << 40}) {
    const AttentionInputs inputs = expanded_inputs(DType::kFloat32, {1, 8, 8, heads, 1, 8});
    EXPECT_EQ(argument_of(plan_report(inputs, {}, &report)), "query");
    EXPECT_EQ(argument_of(plan_chunks(inputs, {}, 0, 0, &chunks)), "query");
  }
  // The most that there may be in a group, in one pass over the plan.
  ASSERT_EQ(plan_report(expanded_inputs(DType::kFloat32, {1, 8, 8, 65536, 1, 8}), {}, &report).message(), "ok");
  EXPECT_EQ(report.shared_heads, 65536);
  EXPECT_EQ(report.counters.kept_scores, 65536 * 8 * 8);
}

// Sizes that are allowed make sizes of memory that nothing wraps around.
TEST(Plans, OfTheLargestSizesTakeACountableNumberOfBytes) {
  constexpr std::int64_t kLongest = (std::int64_t{1} << 31) - 2049, kMostHeads = (std::int64_t{1} << 31) - 1;
  const testing::Shape shapes[] = {
      {1, kLongest, 8, 64, 1, 256},
      {1, 8, kLongest, 64, 64, 256},
      {1, 1 << 28, kLongest, 1, 1, 256},
      {kMostHeads, 1, 8192 - 1, 1, 1, 1},
      {1, 1, 8192 - 1, kMostHeads, kMostHeads, 1},
      {1, 128, 8, 65536, 1, 256},
      {1 << 14, 128, 8, 65536, 1, 256},
      {kMostHeads, 8192 - 1, 1, 1, 1, 1},
  };
  static const double element = 0;
  SerialExecutor executor(64);
  for (const testing::Shape& s : shapes) {
    for (const bool masked : {false, true}) {
      AttentionInputs inputs = expanded_inputs(DType::kBFloat16, s);
      if (masked) {
        inputs.visibility.mask = contiguous_view(&element, DType::kBool, s.batch, s.heads, s.rows, s.keys);
        inputs.visibility.intervals.begin = contiguous_view(&element, DType::kInt32, s.batch, s.heads, s.keys);
        inputs.visibility.mask.strides = inputs.visibility.intervals.begin.strides = {};
        inputs.visibility.intervals.end = inputs.visibility.intervals.begin;
      }
      AttentionCotangents cotangents;
      cotangents.out = cotangents.dout = inputs.query;
      cotangents.lse = contiguous_view(&element, DType::kFloat32, s.batch, s.heads, s.rows);
      AttentionGradients gradients;
      gradients.dquery = contiguous_view(&element, DType::kBFloat16, s.batch, s.rows, s.heads, s.head_dim);
      gradients.dkey = contiguous_view(&element, DType::kBFloat16, s.batch, s.keys, s.key_heads, s.head_dim);
      gradients.dvalue = gradients.dkey;
      const AttentionContext context = {.executor = &executor};
      std::size_t forward = 0, backward = 0;
      ASSERT_EQ(attention_forward_workspace(inputs, {}, context, &forward).message(), "ok");
      ASSERT_EQ(attention_backward_workspace(inputs, cotangents, {}, gradients, context, &backward).message(), "ok");
      // Above what the largest part takes, and far from wrapping around.
      const auto at_least = [&](double bytes) {
        // A forward of few rows indexes intervals a few keys at a time.
        EXPECT_GE(static_cast<double>(s.rows <= 16 ? backward : std::min(forward, backward)), bytes);
        EXPECT_LE(static_cast<double>(std::max(forward, backward)), std::ldexp(1.0, 62));
      };
      at_least(masked ? 12.0 * static_cast<double>(s.batch * s.heads) * static_cast<double>(s.keys) : 1.0);
    }
  }
}

TEST(Plans, ReportTheFloat64PathAsItIs) {
  Call call = Call(kVariants[3], DType::kFloat32).in_float64();
  AttentionCounters counted;
  ASSERT_TRUE(attention_forward(call.inputs(), call.options, call.outputs(), {.counters = &counted}).ok());
  PlanReport report;
  ASSERT_TRUE(plan_report(call.inputs(), call.options, &report).ok());
  testing::expect_same_counters(report.counters, counted);
  EXPECT_EQ(report.backend, "cpu/float64");
}

// ---- Plans that outlive a call. What is in them is tested where there is a GPU.

// Sizes of 3 batch elements, 8 query heads and 2 key heads, or fewer; no element is ever read.
struct PlannedInputs : AttentionInputs {
  explicit PlannedInputs(std::int64_t batch = 3, std::int64_t heads = 8, std::int64_t key_heads = 2,
                         std::int64_t rows = 1500, std::int64_t keys = 1700) {
    query = contiguous_view(kMemory, DType::kBFloat16, batch, rows, heads, 64);
    key = contiguous_view(kMemory, DType::kBFloat16, batch, keys, key_heads, 64);
  }

  alignas(kMemoryAlignment) static inline const std::byte kMemory[kMemoryAlignment] = {};
};

TEST(AttentionPlans, AreOfNoUseOnTheCpu) {
  PlannedInputs inputs;
  inputs.visibility.mask = contiguous_view(inputs.kMemory, DType::kBool, 1500, 1700);
  std::size_t bytes = 1, workspace = 1;
  EXPECT_EQ(attention_plan_bytes(inputs, {}, {}, &bytes).message(), "ok");
  EXPECT_EQ(attention_plan_workspace(inputs, {}, {}, &workspace).message(), "ok");
  EXPECT_EQ(bytes, 0u);
  EXPECT_EQ(workspace, 0u);
  EXPECT_EQ(make_attention_plan(inputs, {}, nullptr, 0, nullptr, 0, {}).message(), "ok");
  EXPECT_EQ(argument_of(attention_plan_bytes({}, {}, {}, &bytes)), "query");
  EXPECT_EQ(argument_of(make_attention_plan({}, {}, nullptr, 0, nullptr, 0, {})), "query");

  // One that is given all the same changes nothing.
  Call call(kVariants[3], DType::kFloat32), planned = call;
  call.run();
  AttentionInputs with_plan = planned.inputs();
  with_plan.visibility.plan = {inputs.kMemory, sizeof inputs.kMemory};
  ASSERT_EQ(attention_forward(with_plan, planned.options, planned.outputs()).message(), "ok");
  ASSERT_EQ(attention_backward(with_plan, planned.cotangents(), planned.options, planned.gradients()).message(), "ok");
  testing::expect_same_bytes(call, planned);
}

std::size_t cuda_plan_bytes(const AttentionInputs& inputs) {
  std::size_t bytes = 0;
  EXPECT_EQ(attention_plan_bytes(inputs, {}, {.device = Device::cuda(nullptr)}, &bytes).message(), "ok");
  return bytes;
}

TEST(AttentionPlans, HaveASizeWithoutAGpu) {
  PlannedInputs inputs;
  inputs.visibility.mask = contiguous_view(inputs.kMemory, DType::kBool, 1, 2, 1500, 1700);
  const AttentionContext context = {.device = Device::cuda(nullptr)};
  if (cuda_info().toolkit == 0) {
    std::size_t bytes = 0;
    EXPECT_EQ(argument_of(attention_plan_bytes(inputs, {}, context, &bytes)), "device");
    GTEST_SKIP() << "built without CUDA";
  }
  EXPECT_EQ(cuda_plan_bytes(PlannedInputs()), 0u) << "the causal rule and lengths are arithmetic";
  // Two chunks of rows for each of two heads: bits and units of 64 rows for every key; then keys, tiles and units of
  // lists.
  const std::size_t chunks = 4, packed = chunks * 1700 * (128 + 4),
                    lists = chunks * (8 + 1792 * 4 + 2 * 28 * 2 + 16 * 4);
  EXPECT_NEAR(static_cast<double>(cuda_plan_bytes(inputs)), static_cast<double>(packed + lists), 6 * 64);
  EXPECT_EQ(cuda_plan_bytes(inputs) % 64, 0u);

  PlannedInputs smallest(1, 2, 2);
  smallest.visibility.mask = inputs.visibility.mask;
  EXPECT_EQ(cuda_plan_bytes(smallest), cuda_plan_bytes(inputs)) << "more heads and batch elements share it";
  inputs.visibility.seqlens_k = contiguous_view(inputs.kMemory, DType::kInt32, 3);
  EXPECT_EQ(cuda_plan_bytes(inputs), cuda_plan_bytes(smallest) + 2 * lists) << "but not with lengths of their own";

  PlannedInputs windowed;
  windowed.visibility.intervals.begin = windowed.visibility.intervals.end =
      contiguous_view(inputs.kMemory, DType::kInt32, 1, 1, 1700);
  const std::size_t whole = cuda_plan_bytes(windowed);
  windowed.visibility.intervals.window_size = 100;  // 1124 keys at most in each of two chunks, in tiles of 128
  EXPECT_EQ(cuda_plan_bytes(windowed), whole - 2 * 4 * (1792 - 1152));
  windowed.visibility.intervals.window_size = 1700;
  EXPECT_EQ(cuda_plan_bytes(windowed), whole);

  PlannedInputs none(3, 8, 2, 1500, 0);
  none.visibility.mask = contiguous_view(inputs.kMemory, DType::kBool, 1500, 0);
  EXPECT_EQ(cuda_plan_bytes(none), 0u);
}

TEST(AttentionPlans, OfAnotherSizeAreRefused) {
  if (cuda_info().toolkit == 0) GTEST_SKIP() << "built without CUDA";
  PlannedInputs inputs;
  inputs.value = inputs.key;
  inputs.visibility.mask = contiguous_view(inputs.kMemory, DType::kBool, 1500, 1700);
  const AttentionContext context = {.device = Device::cuda(nullptr)};
  const std::size_t bytes = cuda_plan_bytes(inputs);
  for (const std::size_t wrong : {bytes - 1, bytes + 64}) {
    inputs.visibility.plan = {inputs.kMemory, wrong};
    std::size_t workspace = 0;
    EXPECT_EQ(attention_forward_workspace(inputs, {}, context, &workspace).message(),
              "plan must have the " + std::to_string(bytes) + " bytes of a plan for this call; got plan of " +
                  std::to_string(wrong) + " bytes");
  }
  auto* memory = const_cast<std::byte*>(inputs.kMemory);
  EXPECT_EQ(argument_of(make_attention_plan(inputs, {}, memory, bytes - 1, nullptr, 0, context)), "plan");
  EXPECT_EQ(argument_of(make_attention_plan(inputs, {}, memory + 1, bytes, nullptr, 0, context)), "plan");
  EXPECT_EQ(argument_of(make_attention_plan(inputs, {}, nullptr, bytes, nullptr, 0, context)), "plan");

  // Long lists are put in order in scratch memory.
  PlannedInputs longer(1, 1, 1, 1500, 30000);
  longer.visibility.mask = contiguous_view(inputs.kMemory, DType::kBool, 1, 30000);
  std::size_t workspace = 0;
  ASSERT_TRUE(attention_plan_workspace(longer, {}, context, &workspace).ok());
  EXPECT_EQ(workspace, 2u * 7552 * 12);
  EXPECT_EQ(argument_of(make_attention_plan(longer, {}, memory, cuda_plan_bytes(longer), memory, 64, context)),
            "workspace");
}

// ---- Intervals of dense masks

struct MaskCase {
  std::int64_t batch, heads, rows, keys;
  bool is_causal;

  std::size_t index(std::int64_t pair, std::int64_t row, std::int64_t key) const {
    return static_cast<std::size_t>((pair * rows + row) * keys + key);
  }
  bool counts(std::int64_t row, std::int64_t key) const { return !is_causal || key <= row + keys - rows; }
};

struct Found {
  Tensor begin, end;
  bool exact = false;
};

Found find(const MaskCase& c, const TensorView& mask, int workers) {
  SerialExecutor executor(workers);
  Found found{Tensor(DType::kInt32, {c.batch, c.heads, c.keys}), Tensor(DType::kInt32, {c.batch, c.heads, c.keys})};
  EXPECT_TRUE(
      mask_intervals(mask, c.is_causal, {found.begin.view(), found.end.view()}, &found.exact, {.executor = &executor})
          .ok());
  return found;
}

// One run of rows for every key, at random; what the causal rule hides is random.
Tensor mask_of_runs(const MaskCase& c, std::mt19937& rng) {
  Tensor mask(DType::kBool, {c.batch, c.heads, c.rows, c.keys});
  for (std::int64_t pair = 0; pair < c.batch * c.heads; ++pair) {
    for (std::int64_t key = 0; key < c.keys; ++key) {
      const auto begin = static_cast<std::int64_t>(rng() % static_cast<unsigned>(c.rows + 1));
      const auto end = static_cast<std::int64_t>(rng() % static_cast<unsigned>(c.rows + 1));
      for (std::int64_t row = 0; row < c.rows; ++row) {
        const bool seen = c.counts(row, key) ? begin <= row && row < end : rng() % 2 == 0;
        mask.set(c.index(pair, row, key), seen ? 1 : 0);
      }
    }
  }
  return mask;
}

const MaskCase kMaskCases[] = {
    {2, 3, 20, 20, false},  {2, 3, 20, 20, true},   {1, 1, 7, 33, true},
    {1, 2, 33, 7, true},    {1, 1, 1, 65, false},   {1, 1, 5, 4097, false},
    {1, 2, 40, 8300, true}, {1, 1, 70, 100, false}, {1, 1, 300, 200, true},
};

TEST(MaskIntervals, SayTheSameAsTheMask) {
  std::mt19937 rng(1);
  for (const MaskCase& c : kMaskCases) {
    const Tensor mask = mask_of_runs(c, rng);
    for (const int workers : {1, 4}) {
      const Found found = find(c, mask.view(), workers);
      ASSERT_TRUE(found.exact);
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(mask.count()); ++i) {
        const std::int64_t key = i % c.keys, row = i / c.keys % c.rows, pair = i / (c.keys * c.rows);
        if (!c.counts(row, key)) continue;
        const auto at = static_cast<std::size_t>(pair * c.keys + key);
        const double begin = found.begin.get(at), end = found.end.get(at), position = static_cast<double>(row);
        ASSERT_EQ(begin <= position && position < end, mask.get(static_cast<std::size_t>(i)) != 0);
        ASSERT_TRUE(begin >= 0 && begin <= end && end <= static_cast<double>(c.rows));
      }
    }
  }
}

// A single key with a gap, wherever it is.
TEST(MaskIntervals, AreNotFoundWhereAKeyHasTwoRuns) {
  std::mt19937 rng(2);
  for (const MaskCase& c : kMaskCases) {
    if (c.rows < 3) continue;
    for (int trial = 0; trial < 5; ++trial) {
      Tensor mask = mask_of_runs(c, rng);
      const auto pair = static_cast<std::int64_t>(rng() % static_cast<unsigned>(c.batch * c.heads));
      // With the causal rule the last three rows see all of these.
      const auto key = static_cast<std::int64_t>(rng() % static_cast<unsigned>(std::max<std::int64_t>(c.keys - 3, 1)));
      for (const std::int64_t back : {1, 2, 3}) mask.set(c.index(pair, c.rows - back, key), back == 2 ? 0 : 1);
      EXPECT_FALSE(find(c, mask.view(), 1).exact);
      EXPECT_FALSE(find(c, mask.view(), 3).exact);
    }
  }
}

TEST(MaskIntervals, ReadAnyStrides) {
  std::mt19937 rng(3);
  const MaskCase c{2, 3, 20, 70, false};
  const Tensor mask = mask_of_runs(c, rng);
  // Stored (keys, rows, heads, batch), two bytes an element.
  Tensor stored(DType::kBool, {c.keys, c.rows, c.heads, c.batch, 2});
  TensorView view = mask.view();
  view.data = const_cast<std::byte*>(stored.bytes().data());
  view.strides = {2, 2 * c.batch, 2 * c.batch * c.heads, 2 * c.batch * c.heads * c.rows};
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(mask.count()); ++i) {
    const std::int64_t key = i % c.keys, row = i / c.keys % c.rows, head = i / (c.keys * c.rows) % c.heads,
                       batch = i / (c.keys * c.rows * c.heads);
    const std::int64_t at =
        batch * view.strides[0] + head * view.strides[1] + row * view.strides[2] + key * view.strides[3];
    stored.set(static_cast<std::size_t>(at), mask.get(static_cast<std::size_t>(i)));
  }
  const Found expected = find(c, mask.view(), 1), found = find(c, view, 2);
  EXPECT_TRUE(found.exact);
  EXPECT_EQ(found.begin.bytes(), expected.begin.bytes());
  EXPECT_EQ(found.end.bytes(), expected.end.bytes());
}

}  // namespace
}  // namespace flash_dmattn
