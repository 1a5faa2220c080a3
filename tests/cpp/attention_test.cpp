// The kernels of every dtype against the fp64 path on the same numbers. tests/python holds them to the full
// numerical bar; these tests find what is wrong, out of bounds or never written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <vector>

#include "attention_testing.h"
#include "flash_dmattn/info.h"
#include "flash_dmattn/plan.h"

namespace flash_dmattn {
namespace {

using testing::Call;
using testing::expect_close;
using testing::expect_results_close;
using testing::kKernelDTypes;
using testing::reference_of;
using testing::SerialExecutor;
using testing::Tensor;
using testing::tolerance;
using testing::typical_size_of;
using testing::Variant;

struct DTypeVariant {
  DType dtype;
  Variant variant;
};

void PrintTo(const DTypeVariant& parameter, std::ostream* os) {
  *os << name_of(parameter.dtype) << " " << parameter.variant.name;
}

std::vector<DTypeVariant> for_every_dtype(const std::vector<Variant>& variants) {
  std::vector<DTypeVariant> list;
  for (const Variant& variant : variants) {
    for (const DType dtype : kKernelDTypes) list.push_back({dtype, variant});
  }
  return list;
}

// B, Sq, Sk, H, Hkv, D: odd on purpose, and around the sizes at which kernels cut.
const std::vector<Variant> kVariants = {
    {.name = "dense", .shape = {2, 33, 65, 4, 2, 32}},
    {.name = "one_by_one", .shape = {1, 1, 1, 1, 1, 1}},
    {.name = "decode", .shape = {3, 1, 131, 4, 1, 64}, .seqlens = {131, 64, 1}, .is_causal = true},
    {.name = "decode_many_keys", .shape = {2, 1, 3333, 4, 2, 40}, .softcap = 1},
    {.name = "decode_lengths",
     .shape = {3, 3, 2500, 4, 2, 24},
     .mask = {3, 1, 3, 2500},
     .seqlens = {2500, 1100, 2},
     .is_causal = true},
    {.name = "decode_list",
     .shape = {1, 16, 1300, 4, 2, 19},
     .mask = {1, 2, 1300},
     .bias = {1, 4, 16, 1300},
     .softcap = 3,
     .density = 0.1},
    {.name = "decode_mask_of_heads", .shape = {1, 5, 1100, 6, 2, 16}, .mask = {1, 6, 5, 1100}, .density = 0.02},
    {.name = "decode_nothing", .shape = {1, 2, 1100, 3, 3, 8}, .mask = {1, 3, 2, 1100}, .density = 0},
    {.name = "head_dim_1", .shape = {1, 17, 31, 2, 2, 1}, .is_causal = true},
    {.name = "head_dim_40", .shape = {1, 65, 64, 2, 1, 40}, .bias = {1, 2, 1, 64}, .is_causal = true},
    {.name = "head_dim_97", .shape = {1, 20, 40, 2, 1, 97}, .bias = {20, 40}},
    {.name = "head_dim_256", .shape = {1, 31, 70, 1, 1, 256}, .mask = {31, 70}},
    {.name = "sink", .shape = {2, 70, 90, 4, 2, 24}, .mask = {2, 4, 70, 90}, .bias = {2, 4, 70, 90}, .sink = true},
    {.name = "float_sink",
     .shape = {2, 40, 300, 4, 4, 16},
     .bias = {1, 4, 1, 300},
     .is_causal = true,
     .float_sink = true},
    {.name = "sink_over_batch",
     .shape = {3, 40, 50, 6, 2, 16},
     .bias = {1, 1, 40, 50},
     .seqlens = {1, 0, 50},
     .sink = true},
    {.name = "sink_few_rows", .shape = {2, 300, 33, 2, 1, 16, 40}, .is_causal = true, .sink = true},
    {.name = "decode_sink", .shape = {2, 3, 2500, 4, 2, 24}, .softcap = 2, .sink = true},
    {.name = "value_dim_1", .shape = {1, 40, 70, 2, 1, 40, 1}, .bias = {1, 2, 40, 70}, .is_causal = true},
    {.name = "value_dim_33", .shape = {2, 33, 65, 4, 2, 16, 33}, .mask = {2, 1, 33, 65}, .bias = {2, 4, 1, 65}},
    {.name = "value_dim_128", .shape = {1, 40, 300, 2, 2, 192, 128}, .is_causal = true},
    {.name = "value_dim_256", .shape = {1, 31, 70, 2, 1, 1, 256}, .mask = {31, 70}, .softcap = 2},
    {.name = "decode_wide_values", .shape = {2, 3, 1300, 4, 2, 24, 71}, .bias = {2, 4, 1, 1300}, .is_causal = true},
    {.name = "decode_narrow_values", .shape = {1, 1, 2500, 8, 2, 192, 20}, .mask = {1, 2, 1, 2500}},
    {.name = "causal_square", .shape = {1, 129, 129, 2, 1, 16}, .is_causal = true},
    {.name = "causal_more_keys", .shape = {1, 33, 300, 2, 1, 16}, .is_causal = true},
    {.name = "causal_more_rows", .shape = {1, 300, 33, 2, 1, 16}, .is_causal = true},
    {.name = "full_mask", .shape = {2, 70, 90, 4, 2, 24}, .mask = {2, 4, 70, 90}, .bias = {2, 4, 70, 90}},
    {.name = "mask_of_key_heads", .shape = {2, 70, 90, 4, 2, 24}, .mask = {2, 2, 70, 90}, .bias = {1, 2, 70, 90}},
    {.name = "sparse_mask", .shape = {1, 200, 300, 2, 1, 16}, .mask = {200, 300}, .density = 0.004},
    {.name = "mask_per_row", .shape = {2, 70, 90, 2, 2, 24}, .mask = {2, 1, 70, 1}, .bias = {2, 2, 70, 1}},
    {.name = "few_keys", .shape = {2, 70, 500, 4, 2, 16}, .mask = {2, 2, 500}, .bias = {2, 2, 500}, .density = 0.05},
    {.name = "bias_for_all", .shape = {2, 40, 50, 2, 1, 16}, .bias = {1, 1, 1, 1}, .is_causal = true},
    {.name = "bias_over_batch", .shape = {3, 40, 50, 2, 1, 16}, .bias = {1, 2, 40, 50}},
    {.name = "float_bias", .shape = {2, 40, 50, 2, 1, 16}, .bias = {2, 1, 1, 50}, .float_bias = true},
    {.name = "lengths", .shape = {3, 40, 100, 2, 1, 16}, .bias = {1, 1, 100}, .seqlens = {1, 0, 77}, .is_causal = true},
    {.name = "softcap", .shape = {1, 40, 50, 2, 1, 16}, .bias = {1, 2, 40, 50}, .softcap = 2.5},
    {.name = "nothing_visible", .shape = {1, 40, 50, 2, 1, 16}, .mask = {40, 50}, .bias = {40, 50}, .density = 0},
    {.name = "no_keys", .shape = {2, 5, 0, 2, 1, 16}, .bias = {1, 1, 1, 1}},
    {.name = "no_rows", .shape = {2, 0, 5, 2, 1, 16}, .bias = {1, 1, 1, 5}},
    {.name = "no_batch", .shape = {0, 4, 5, 2, 1, 16}, .bias = {1, 2, 4, 5}},
    {.name = "no_heads", .shape = {2, 4, 5, 0, 1, 16}, .bias = {1, 1, 4, 5}},
    {.name = "intervals", .shape = {2, 70, 190, 4, 2, 24}, .is_causal = true, .intervals = {1, 2, 190}},
    {.name = "intervals_mask_and_lists",
     .shape = {2, 70, 190, 4, 2, 24},
     .mask = {2, 1, 190},
     .seqlens = {190, 77},
     .intervals = {2, 1, 190},
     .indices = {1, 4, 70, 90}},
    {.name = "decode_intervals_and_lists",
     .shape = {2, 8, 1300, 4, 2, 24},
     .intervals = {1, 1, 1300},
     .indices = {2, 2, 8, 600}},
    {.name = "lists", .shape = {2, 70, 190, 4, 2, 24}, .is_causal = true, .indices = {2, 1, 70, 31}},
    {.name = "lists_of_key_heads",
     .shape = {2, 150, 300, 4, 2, 16},
     .bias = {1, 4, 150, 300},
     .indices = {1, 2, 150, 20},
     .has_lengths = true},
    {.name = "lists_of_heads_and_mask",
     .shape = {2, 40, 90, 4, 2, 16},
     .mask = {2, 1, 90},
     .bias = {2, 2, 90},
     .seqlens = {90, 33},
     .indices = {2, 4, 40, 60}},
    {.name = "lists_and_full_mask",
     .shape = {1, 40, 90, 4, 2, 16},
     .mask = {40, 90},
     .indices = {1, 1, 40, 60},
     .has_lengths = true},
    {.name = "one_list", .shape = {2, 40, 190, 4, 2, 16}, .is_causal = true, .indices = {2, 2, 1, 60}},
    {.name = "one_list_and_row_mask", .shape = {1, 40, 90, 2, 2, 16}, .mask = {40, 1}, .indices = {1, 1, 1, 40}},
    {.name = "lists_of_blocks",
     .shape = {1, 140, 777, 2, 1, 16},
     .seqlens = {770},
     .is_causal = true,
     .indices = {1, 1, 140, 3},
     .block_size = 100},
    {.name = "lists_without_entries", .shape = {1, 20, 30, 2, 1, 16}, .bias = {20, 30}, .indices = {1, 1, 20, 0}},
    {.name = "decode_lists",
     .shape = {2, 8, 1300, 4, 2, 24},
     .bias = {2, 2, 1300},
     .is_causal = true,
     .indices = {2, 2, 8, 400},
     .has_lengths = true},
    {.name = "decode_blocks_and_mask",
     .shape = {2, 8, 1300, 4, 2, 40},
     .mask = {2, 1, 1300},
     .seqlens = {1210, 900},
     .indices = {1, 4, 8, 7},
     .block_size = 64},
    {.name = "many_chunks",
     .shape = {1, 650, 700, 2, 1, 16},
     .mask = {1, 1, 650, 700},
     .bias = {1, 2, 1, 700},
     .is_causal = true,
     .density = 0.01},
};

class Attention : public ::testing::TestWithParam<DTypeVariant> {
 protected:
  Call call_ = Call(GetParam().variant, GetParam().dtype);
};

TEST_P(Attention, AgreesWithFloat64) {
  call_.run();
  expect_results_close(call_, reference_of(call_));
}

TEST_P(Attention, UnseenNaNTouchesNothing) {
  if (call_.query.count() > 0) testing::poison_unseen(&call_);
  call_.run();
  expect_results_close(call_, reference_of(call_));
}

TEST_P(Attention, DeterministicRunsHaveTheSameBits) {
  call_.options.deterministic = true;
  call_.run();
  for (const int workers : {1, 2, 5}) {
    Call again = call_;
    again.make_results();
    SerialExecutor executor(workers);
    again.run({.executor = &executor});
    testing::expect_same_bytes(call_, again);
  }
}

TEST_P(Attention, CountsItsWork) {
  AttentionCounters low, high;
  call_.run({.counters = &low});
  Call reference = call_.in_float64();
  reference.run({.counters = &high});
  EXPECT_EQ(low.kept_scores, high.kept_scores);
  EXPECT_GE(low.computed_scores, low.kept_scores);
  EXPECT_LE(low.tiles_partial, low.tiles_visited);
  EXPECT_GE(low.tiles_empty, 0);
  EXPECT_EQ(low.tiles_visited > 0, low.kept_scores > 0);
}

TEST_P(Attention, DoesWhatItsPlanReports) {
  for (const int workers : {1, 3}) {
    SerialExecutor executor(workers);
    for (const bool deterministic : {false, true}) {
      AttentionCounters counted;
      call_.options.deterministic = deterministic;
      const AttentionContext context{.executor = &executor, .counters = &counted};
      ASSERT_TRUE(attention_forward(call_.inputs(), call_.options, call_.outputs(), context).ok());
      PlanReport report;
      AttentionInputs inputs = call_.inputs();
      inputs.value = {};
      ASSERT_TRUE(plan_report(inputs, call_.options, &report, {.executor = &executor}).ok());
      testing::expect_same_counters(report.counters, counted);
    }
  }
}

// Scratch memory of exactly the size asked for, aligned as it must be and no more, full of NaN.
class GuardedWorkspace {
 public:
  explicit GuardedWorkspace(std::size_t bytes)
      : bytes_(bytes),
        memory_(
            static_cast<std::byte*>(::operator new(kGuard + bytes + kGuard, std::align_val_t{2 * kMemoryAlignment}))) {
    std::fill_n(memory_, kGuard + bytes + kGuard, std::byte{0xff});
  }
  ~GuardedWorkspace() {
    for (std::size_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(memory_[i], std::byte{0xff}) << "written " << kGuard - i << " bytes before the workspace";
      EXPECT_EQ(memory_[kGuard + bytes_ + i], std::byte{0xff}) << "written " << i << " bytes past the workspace";
    }
    ::operator delete(memory_, std::align_val_t{2 * kMemoryAlignment});
  }
  GuardedWorkspace(const GuardedWorkspace&) = delete;
  GuardedWorkspace& operator=(const GuardedWorkspace&) = delete;

  void* get() const { return memory_ + kGuard; }

 private:
  static constexpr std::size_t kGuard = kMemoryAlignment;
  std::size_t bytes_;
  std::byte* memory_;
};

TEST_P(Attention, NeedsTheWorkspaceItAsksFor) {
  SerialExecutor executor(3);
  const AttentionContext context{.executor = &executor};
  std::size_t bytes = 0;
  ASSERT_TRUE(attention_forward_workspace(call_.inputs(), call_.options, context, &bytes).ok());
  {
    const GuardedWorkspace workspace(bytes);
    const Status status =
        attention_forward(call_.inputs(), call_.options, call_.outputs(), workspace.get(), bytes, context);
    ASSERT_EQ(status.message(), "ok");
  }
  ASSERT_TRUE(attention_backward_workspace(call_.inputs(), call_.cotangents(), call_.options, call_.gradients(),
                                           context, &bytes)
                  .ok());
  {
    const GuardedWorkspace workspace(bytes);
    const Status status = attention_backward(call_.inputs(), call_.cotangents(), call_.options, call_.gradients(),
                                             workspace.get(), bytes, context);
    ASSERT_EQ(status.message(), "ok");
  }
  expect_results_close(call_, reference_of(call_));
}

TEST_P(Attention, ComputesOnlyTheGradientsAskedFor) {
  const Call reference = reference_of(call_);
  ASSERT_TRUE(attention_forward(call_.inputs(), call_.options, call_.outputs()).ok());
  // As results() has them behind out and lse.
  std::vector<TensorView AttentionGradients::*> members = {&AttentionGradients::dquery, &AttentionGradients::dkey,
                                                           &AttentionGradients::dvalue};
  if (call_.bias.defined()) members.push_back(&AttentionGradients::dbias);
  if (call_.sink.defined()) members.push_back(&AttentionGradients::dsink);
  const auto expected = reference.results();
  for (std::size_t only = 0; only + 2 < expected.size(); ++only) {
    Call alone = call_;
    AttentionGradients gradients;
    gradients.*members[only] = alone.gradients().*members[only];
    ASSERT_TRUE(attention_backward(alone.inputs(), alone.cotangents(), alone.options, gradients).ok());
    const auto results = alone.results();
    for (std::size_t i = 0; i + 2 < expected.size(); ++i) {
      const auto& [name, tensor] = results[i + 2];
      if (i == only) {
        expect_close(*tensor, *expected[i + 2].second, tolerance(alone.query.dtype()), name + " alone",
                     typical_size_of(name, alone));
      } else {
        EXPECT_EQ(tensor->bytes(), call_.results()[i + 2].second->bytes()) << name << " was not asked for";
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Variants, Attention, ::testing::ValuesIn(for_every_dtype(kVariants)),
                         [](const ::testing::TestParamInfo<DTypeVariant>& info) {
                           return info.param.variant.name + "_" + name_of(info.param.dtype);
                         });

}  // namespace
}  // namespace flash_dmattn
