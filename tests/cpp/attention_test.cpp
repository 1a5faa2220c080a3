// The kernels of every dtype against the fp64 path on the same numbers. tests/python holds them to the full
// numerical bar; these tests find what is wrong, out of bounds or never written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention_testing.h"
#include "core/thread_pool.h"
#include "flash_dmattn/info.h"
#include "flash_dmattn/plan.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);  // fuzz_attention.cpp

namespace flash_dmattn {
namespace {

using testing::Call;
using testing::SerialExecutor;
using testing::Tensor;
using testing::Variant;

// Root mean square error, relative to that of the values; any single error may be this much larger.
double tolerance(DType dtype) { return dtype == DType::kFloat32 ? 2e-6 : dtype == DType::kFloat16 ? 2e-3 : 1.2e-2; }
constexpr double kWorstFactor = 20;
// Below this size values are what cancellation left, and relative errors mean nothing. A bias's gradient is
// a sum over as many scores as it has fewer elements than there are scores, a sink's over rows; most of it cancels.
constexpr double kTypicalSize = 0.01;
constexpr double kTypicalSummand = 0.3;

void expect_close(const Tensor& got, const Tensor& expected, double tolerance, const std::string& name,
                  double typical_size = kTypicalSize) {
  ASSERT_EQ(got.shape(), expected.shape()) << name;
  double error = 0, size = 0, worst = 0;
  for (std::size_t i = 0; i < got.count(); ++i) {
    const double left = got.get(i), right = expected.get(i);
    if (!std::isfinite(right)) {
      ASSERT_TRUE(std::isnan(right) ? std::isnan(left) : left == right) << name << "[" << i << "] " << left;
      continue;
    }
    ASSERT_TRUE(std::isfinite(left)) << name << "[" << i << "] is " << left << ", not " << right;
    error += (left - right) * (left - right);
    size += right * right;
    worst = std::max(worst, std::fabs(left - right));
  }
  if (got.count() == 0) return;
  const auto count = static_cast<double>(got.count());
  const double allowed = tolerance * (std::sqrt(size / count) + typical_size);
  EXPECT_LE(std::sqrt(error / count), allowed) << name;
  EXPECT_LE(worst, kWorstFactor * allowed) << name;
}

// The same call in fp64.
Call reference_of(const Call& call) {
  Call reference = call.in_float64();
  reference.run();
  return reference;
}

double typical_size_of(const std::string& name, const Call& call) {
  const double summands = testing::summands_of(name, call);
  return summands > 1 ? kTypicalSummand * std::sqrt(summands) : kTypicalSize;
}

void expect_results_close(const Call& got, const Call& expected) {
  const auto left = got.results(), right = expected.results();
  for (std::size_t i = 0; i < left.size(); ++i) {
    // lse is float32 and never goes through the dtype of the products.
    const auto& [name, tensor] = left[i];
    expect_close(*tensor, *right[i].second, tolerance(name == "lse" ? DType::kFloat32 : got.query.dtype()), name,
                 typical_size_of(name, got));
  }
}

constexpr DType kKernelDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

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

TEST(AttentionWorkspace, TooLittleOrUnalignedIsRefused) {
  Call call({.name = "workspace", .shape = {1, 33, 65, 2, 1, 32}}, DType::kFloat32);
  std::size_t bytes = 0;
  ASSERT_TRUE(attention_forward_workspace(call.inputs(), call.options, {}, &bytes).ok());
  ASSERT_GT(bytes, 0u);
  std::vector<std::byte> memory(bytes + 2 * kMemoryAlignment);
  auto* aligned =
      memory.data() + (kMemoryAlignment - reinterpret_cast<std::uintptr_t>(memory.data()) % kMemoryAlignment);
  const auto run = [&](void* workspace, std::size_t size) {
    return attention_forward(call.inputs(), call.options, call.outputs(), workspace, size).argument();
  };
  EXPECT_EQ(run(aligned, bytes - 1), "workspace");
  EXPECT_EQ(run(aligned + 1, bytes), "workspace");
  EXPECT_EQ(run(nullptr, bytes), "workspace");
  EXPECT_EQ(run(aligned, bytes), "");
}

TEST(AttentionWorkspace, GrowsWithLengthsNotWithTheirProduct) {
  const auto bytes_of = [](std::int64_t length) {
    const Call call({.name = "long", .shape = {1, 1, 1, 2, 1, 32}}, DType::kFloat32);
    AttentionInputs inputs = call.inputs();  // never read: only the sizes count
    for (TensorView* view : {&inputs.query, &inputs.key, &inputs.value}) view->shape[1] = length;
    inputs.visibility.mask = contiguous_view(call.query.view().data, DType::kBool, length, length);
    std::size_t bytes = 0;
    SerialExecutor executor(2);
    EXPECT_TRUE(attention_forward_workspace(inputs, call.options, {.executor = &executor}, &bytes).ok());
    return bytes;
  };
  EXPECT_LE(bytes_of(1 << 17), 2 * bytes_of(1 << 16) + 4096);
}

TEST(Attention, ReadsAnyStridesAndAlignments) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const Variant variant{
        .name = "strides", .shape = {2, 20, 70, 4, 2, 24}, .mask = {2, 4, 20, 70}, .bias = {2, 4, 20, 70}};
    Call plain(variant, dtype);
    plain.run();
    // Every input again as (heads, batch, sequence, D or keys) with a row pitch of three more and one element of
    // offset.
    std::vector<Tensor> storage;
    storage.reserve(6);
    const auto moved = [&](const Tensor& tensor) {
      const auto& s = tensor.shape();
      const std::int64_t pitch = s[3] + 3;
      storage.emplace_back(tensor.dtype(), std::vector<std::int64_t>{1 + s[0] * s[1] * s[2] * pitch});
      TensorView view = tensor.view();
      view.data = static_cast<std::byte*>(storage.back().view().data) + size_of(tensor.dtype());
      view.strides = {s[1] * pitch, pitch, s[0] * s[1] * pitch, 1};
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(tensor.count()); ++i) {
        const std::int64_t at[] = {i / (s[1] * s[2] * s[3]), i / (s[2] * s[3]) % s[1], i / s[3] % s[2], i % s[3]};
        std::int64_t offset = 1;
        for (std::size_t dim = 0; dim < 4; ++dim) offset += at[dim] * view.strides[dim];
        storage.back().set(static_cast<std::size_t>(offset), tensor.get(static_cast<std::size_t>(i)));
      }
      return view;
    };
    Call call = plain;
    call.make_results();
    const AttentionInputs inputs = {.query = moved(call.query),
                                    .key = moved(call.key),
                                    .value = moved(call.value),
                                    .bias = moved(call.bias),
                                    .visibility = {.mask = moved(call.mask)}};
    ASSERT_EQ(attention_forward(inputs, call.options, call.outputs()).message(), "ok");
    AttentionCotangents cotangents = call.cotangents();
    cotangents.dout = moved(call.dout);
    ASSERT_EQ(attention_backward(inputs, cotangents, call.options, call.gradients()).message(), "ok");
    testing::expect_same_bytes(plain, call);
  }
}

// Few query rows: keys are split as the shape says, for any number of workers, in any order, asked for or not.
TEST(Attention, DecodesToTheSameBitsForAnyNumberOfWorkers) {
  for (const DType dtype : kKernelDTypes) {
    for (const std::int64_t rows : {1, 3, 16}) {
      Call call({.name = "decode", .shape = {1, rows, 4097, 4, 4, 48}, .mask = {1, 4, 1, 4097}}, dtype);
      ASSERT_TRUE(attention_forward(call.inputs(), call.options, call.outputs()).ok());
      for (const int workers : {1, 2, 3, 7, 64}) {
        Call again = call;
        again.make_results();
        SerialExecutor executor(workers);
        ASSERT_TRUE(attention_forward(again.inputs(), again.options, again.outputs(), {.executor = &executor}).ok());
        EXPECT_EQ(call.out.bytes(), again.out.bytes()) << name_of(dtype) << " " << rows << " rows, " << workers;
        EXPECT_EQ(call.lse.bytes(), again.lse.bytes());
        EXPECT_EQ(call.row_stats.bytes(), again.row_stats.bytes());
      }
    }
  }
}

// Threads that finish in any order merge the same parts.
TEST(Attention, DecodesOnThreads) {
  Call call({.name = "decode", .shape = {2, 1, 5000, 8, 2, 64}}, DType::kFloat32);
  ASSERT_TRUE(attention_forward(call.inputs(), call.options, call.outputs()).ok());
  for (int i = 0; i < 20; ++i) {
    Call again = call;
    again.make_results();
    ASSERT_TRUE(attention_forward(again.inputs(), again.options, again.outputs()).ok());
    ASSERT_EQ(call.out.bytes(), again.out.bytes());
  }
}

TEST(Attention, VisibleNaNAndInfinityComeOut) {
  for (const DType dtype : kKernelDTypes) {
    for (Tensor Call::*const input : {&Call::query, &Call::key, &Call::value, &Call::bias, &Call::dout}) {
      for (const double bad : {std::nan(""), HUGE_VAL}) {
        Call call({.name = "visible", .shape = {2, 20, 70, 2, 1, 24}, .bias = {2, 2, 20, 70}}, dtype);
        const std::size_t first = (call.*input).count() - 24;  // of the last batch element
        const bool makes_scores = input == &Call::query || input == &Call::key;
        for (std::size_t i = first; i < (makes_scores ? first + 24 : first + 1); ++i) (call.*input).set(i, bad);
        call.run();
        const Call reference = reference_of(call);
        const auto got = call.results(), expected = reference.results();
        for (std::size_t i = 0; i < got.size(); ++i) {
          const auto& [name, tensor] = got[i];
          for (std::size_t at = 0; at < tensor->count(); ++at) {
            const bool finite = std::isfinite(expected[i].second->get(at));
            // The other batch element is out of reach.
            if (finite && at >= tensor->count() / 2) continue;
            ASSERT_EQ(std::isfinite(tensor->get(at)), finite) << name << "[" << at << "] " << name_of(dtype);
          }
        }
      }
    }
  }
}

// A bias that is the same for all keys changes lse and nothing else, also where lse is too coarse for the rows' sums.
TEST(Attention, ALargeBiasOfAllKeysChangesNoGradient) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    Call call({.name = "large", .shape = {1, 9, 70, 2, 1, 8}, .bias = {1, 1, 1, 70}, .float_bias = true}, dtype);
    call.query.fill([] { return 0.0; });
    call.bias.fill([] { return 0.0; });
    call.run();
    for (const double size : {-1e9, 1e9, 1e30, -double{std::numeric_limits<float>::max()}}) {
      Call large = call;
      large.bias.fill([&] { return size; });
      large.run();
      EXPECT_FLOAT_EQ(static_cast<float>(large.lse.get(0)), static_cast<float>(size));
      large.lse = call.lse;
      expect_same_bytes(large, call);
    }
  }
}

TEST(Attention, SinksThatAreNotFinite) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64}) {
    for (const std::int64_t rows : {std::int64_t{40}, std::int64_t{3}}) {  // packed, and where they lie
      // The second batch element has no keys.
      Call call({.name = "sinks", .shape = {2, rows, 70, 4, 1, 24}, .bias = {1, 1, 1, 70}, .seqlens = {70, 0}}, dtype);
      call.run();
      Call sunk = call;
      sunk.sink = Tensor(dtype, {4});
      const double sinks[] = {-HUGE_VAL, std::nan(""), HUGE_VAL, 0.5};
      for (std::size_t h = 0; h < 4; ++h) sunk.sink.set(h, sinks[h]);
      sunk.make_results();
      sunk.run();
      EXPECT_EQ(sunk.lse.bytes(), call.lse.bytes()) << name_of(dtype);
      for (std::size_t i = 0; i < call.out.count(); ++i) {
        const std::size_t head = i / 24 % 4;
        for (const auto& [got, plain] : {std::pair(&sunk.out, &call.out), std::pair(&sunk.dquery, &call.dquery)}) {
          if (head == 0 || i >= call.out.count() / 2) {
            ASSERT_EQ(got->get(i), plain->get(i)) << name_of(dtype) << " " << i;
          } else {
            ASSERT_EQ(std::isnan(got->get(i)), head != 3) << name_of(dtype) << " " << i;
          }
        }
      }
      EXPECT_EQ(sunk.dsink.get(0), 0) << name_of(dtype);
      EXPECT_TRUE(std::isnan(sunk.dsink.get(1)) && std::isnan(sunk.dsink.get(2))) << name_of(dtype);
      EXPECT_TRUE(std::isfinite(sunk.dsink.get(3))) << name_of(dtype);
    }
  }
}

TEST(Attention, ResultsAreRoundedToNearest) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    const double eps = dtype == DType::kBFloat16 ? 1.0 / (1 << 7) : 1.0 / (1 << 10);
    Call call({.name = "rounding", .shape = {1, 1, 4, 1, 1, 8}}, dtype);
    call.query.fill([] { return 0.0; });  // all keys weigh a quarter
    call.value.fill([] { return 1.0; });
    for (std::size_t d = 0; d < 8; ++d) call.value.set(d, 1 + static_cast<double>(d) * eps);
    ASSERT_TRUE(attention_forward(call.inputs(), call.options, call.outputs()).ok());
    for (std::size_t d = 0; d < 8; ++d) {  // halves round to even, as nearbyint does
      EXPECT_EQ(call.out.get(d), 1 + std::nearbyint(static_cast<double>(d) / 4) * eps) << name_of(dtype) << " " << d;
    }
  }
}

TEST(Attention, SurvivesRandomCalls) {
  std::mt19937 random(11);
  std::vector<std::uint8_t> bytes(64);
  for (int i = 0; i < 400; ++i) {
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());  // aborts where something is wrong
  }
}

// From several threads, on one pool that they share and on pools of other sizes.
TEST(Attention, CallsAtTheSameTimeHaveTheBitsOfCallsAlone) {
  const Variant variants[] = {
      {.name = "mask", .shape = {2, 70, 90, 4, 2, 32}, .mask = {2, 2, 70, 90}, .bias = {2, 4, 1, 90}},
      {.name = "causal", .shape = {2, 130, 130, 4, 2, 32}, .is_causal = true, .sink = true},
      {.name = "decode", .shape = {1, 2, 2100, 4, 2, 32}, .mask = {1, 1, 1, 2100}},
  };
  internal::ThreadPool shared(3);
  std::vector<std::jthread> callers;
  for (const Variant& variant : variants) {
    for (int caller = 0; caller < 2; ++caller) {
      callers.emplace_back([&variant, &shared, caller] {
        Call alone(variant, DType::kFloat32);
        alone.options.deterministic = true;
        Call together = alone;
        SerialExecutor one(1);
        alone.run({.executor = &one});
        for (int round = 0; round < 20; ++round) {
          internal::ThreadPool own(1 + round % 3);
          together.make_results();
          together.run({.executor = caller == 0 ? &shared : &own});
          testing::expect_same_bytes(together, alone);
        }
      });
    }
  }
}

TEST(Attention, ReportsWhatIsWrongBeforeTouchingMemory) {
  Call call({.name = "wrong"}, DType::kFloat32);
  AttentionInputs inputs = call.inputs();
  inputs.key.shape[3] = 2;
  const Call untouched = call;
  EXPECT_EQ(attention_forward(inputs, call.options, call.outputs()).argument(), "key");
  EXPECT_EQ(attention_backward(inputs, call.cotangents(), call.options, call.gradients()).argument(), "key");
  testing::expect_same_bytes(call, untouched);
}

}  // namespace
}  // namespace flash_dmattn
