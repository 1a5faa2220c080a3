// What holds for every public call: results are given somewhere, devices are known ones, and no call throws, however
// little memory there is.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "attention_testing.h"
#include "core/thread_pool.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/info.h"
#include "flash_dmattn/kept_keys.h"
#include "flash_dmattn/plan.h"
#include "flash_dmattn/selection.h"
#include "flash_dmattn/version.h"

namespace {

// How many more allocations of this thread succeed; negative: all.
thread_local std::int64_t allocations_left = -1;

void* allocate(std::size_t bytes, std::size_t alignment) {
  constexpr std::size_t kMost = std::size_t{1} << 36;  // more than tests need; sanitizers would stop at it
  if (allocations_left == 0 || bytes > kMost) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  void* memory = nullptr;
  if (posix_memalign(&memory, alignment, bytes) != 0) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<std::size_t>(alignment));
}
// Under a sanitizer these would not call those above.
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void* operator new(std::size_t bytes, std::align_val_t alignment, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes, alignment);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace flash_dmattn {
namespace {

using testing::Call;
using testing::Tensor;
using testing::Variant;

// Between them every argument of attention, with work enough for several workers; the last is a decode over several
// splits of its keys.
const Variant kVariants[] = {
    {.name = "mask",
     .shape = {2, 128, 200, 4, 2, 64},
     .mask = {2, 2, 128, 200},
     .bias = {2, 4, 1, 200},
     .intervals = {2, 2, 200}},
    {.name = "lists",
     .shape = {2, 128, 200, 4, 2, 64, 24},
     .bias = {1, 4, 128, 200},
     .seqlens = {200, 150},
     .is_causal = true,
     .softcap = 5,
     .indices = {2, 4, 128, 20},
     .has_lengths = true,
     .block_size = 3,
     .sink = true},
    {.name = "decode",
     .shape = {2, 3, 3000, 4, 2, 64, 80},
     .mask = {2, 2, 1, 3000},
     .indices = {2, 2, 3, 600},
     .has_lengths = true,
     .sink = true,
     .float_sink = true},
};

// Arguments of every call.
struct Everything {
  explicit Everything(const Variant& variant = kVariants[0], DType dtype = DType::kFloat32)
      : call(variant, dtype == DType::kFloat64 ? DType::kFloat32 : dtype),
        mask(DType::kBool, {2, 2, 128, 200}),
        scores(DType::kFloat32, {2, 2, 200}),
        begin(DType::kInt32, {2, 2, 200}),
        end(DType::kInt32, {2, 2, 200}),
        cu_seqlens(DType::kInt32, {4}),
        document_begin(DType::kInt32, {1, 1, 200}),
        document_end(DType::kInt32, {1, 1, 200}),
        kept_indices(DType::kInt32, {2, 2, 6000}),
        kept_scores(DType::kFloat32, {2, 2, 6000}),
        new_scores(DType::kFloat32, {2, 2, 3}),
        positions(DType::kInt32, {2}),
        lists(DType::kInt32, {2, 2, 3, 6000}) {
    if (dtype == DType::kFloat64) call = call.in_float64();
    int number = 0;
    for (Tensor* tensor : {&mask, &scores}) tensor->fill([&] { return number++ * 7 % 11 - 2; });
    number = 0;
    cu_seqlens.fill([&] { return number++ * 50; });
  }

  KeyIntervals intervals() const { return {begin.view(), end.view()}; }
  SelectionInputs selection() const { return {.scores = scores.view()}; }
  SelectionInputs packed_selection() const {
    SelectionInputs inputs = selection();
    inputs.cu_seqlens_q = inputs.cu_seqlens_k = cu_seqlens.view();
    return inputs;
  }

  Call call;
  Tensor mask, scores, begin, end, cu_seqlens, document_begin, document_end;
  Tensor kept_indices, kept_scores, new_scores, positions, lists;
  SelectionOptions selection_options{.window_size = 8, .seqlen_q = 128, .causal = true};
};

struct PublicCall {
  std::string name;
  std::function<Status(const Everything&, const AttentionContext&)> run;
};

SelectionContext selection_context(const AttentionContext& context) { return {context.executor, context.device}; }

using BytesCall = std::function<Status(const Everything&, const AttentionContext&, std::size_t*)>;

const std::pair<std::string, BytesCall> kBytesCalls[] = {
    {"attention_plan_bytes",
     [](const Everything& e, const AttentionContext& context, std::size_t* bytes) {
       return attention_plan_bytes(e.call.inputs(), e.call.options, context, bytes);
     }},
    {"attention_plan_workspace",
     [](const Everything& e, const AttentionContext& context, std::size_t* bytes) {
       return attention_plan_workspace(e.call.inputs(), e.call.options, context, bytes);
     }},
    {"attention_forward_workspace",
     [](const Everything& e, const AttentionContext& context, std::size_t* bytes) {
       return attention_forward_workspace(e.call.inputs(), e.call.options, context, bytes);
     }},
    {"attention_backward_workspace",
     [](const Everything& e, const AttentionContext& context, std::size_t* bytes) {
       return attention_backward_workspace(e.call.inputs(), e.call.cotangents(), e.call.options, e.call.gradients(),
                                           context, bytes);
     }},
    {"plan_report_workspace",
     [](const Everything& e, const AttentionContext& context, std::size_t* bytes) {
       return plan_report_workspace(e.call.inputs(), e.call.options, context, bytes);
     }},
    {"select_keys_workspace",
     [](const Everything& e, const AttentionContext& context, std::size_t* bytes) {
       return select_keys_workspace(e.selection(), e.selection_options, selection_context(context), bytes);
     }},
    {"select_keys_workspace of documents",
     [](const Everything& e, const AttentionContext& context, std::size_t* bytes) {
       return select_keys_workspace(e.packed_selection(), e.selection_options, selection_context(context), bytes);
     }},
    {"mask_intervals_workspace",
     [](const Everything& e, const AttentionContext& context, std::size_t* bytes) {
       return mask_intervals_workspace(e.mask.view(), e.intervals(), selection_context(context), bytes);
     }},
};

// The one call that takes no context.
constexpr const char* kOnNoDevice = "document_intervals";

std::vector<PublicCall> public_calls() {
  std::vector<PublicCall> calls;
  for (const auto& [name, call] : kBytesCalls) {
    calls.push_back({name, [call](const Everything& e, const AttentionContext& context) {
                       std::size_t bytes = 0;
                       return call(e, context, &bytes);
                     }});
  }
  calls.push_back({"make_attention_plan", [](const Everything& e, const AttentionContext& context) {
                     return make_attention_plan(e.call.inputs(), e.call.options, nullptr, 0, nullptr, 0, context);
                   }});
  calls.push_back({"attention_forward", [](const Everything& e, const AttentionContext& context) {
                     return attention_forward(e.call.inputs(), e.call.options, e.call.outputs(), context);
                   }});
  calls.push_back({"attention_backward", [](const Everything& e, const AttentionContext& context) {
                     return attention_backward(e.call.inputs(), e.call.cotangents(), e.call.options, e.call.gradients(),
                                               context);
                   }});
  calls.push_back({"select_keys", [](const Everything& e, const AttentionContext& context) {
                     return select_keys(e.selection(), e.selection_options, e.intervals(), selection_context(context));
                   }});
  calls.push_back({"select_keys of documents", [](const Everything& e, const AttentionContext& context) {
                     return select_keys(e.packed_selection(), e.selection_options, e.intervals(),
                                        selection_context(context));
                   }});
  calls.push_back({kOnNoDevice, [](const Everything& e, const AttentionContext&) {
                     return document_intervals(e.cu_seqlens.view(), e.cu_seqlens.view(), 128, true,
                                               {e.document_begin.view(), e.document_end.view()});
                   }});
  calls.push_back({"append_kept_keys", [](const Everything& e, const AttentionContext& context) {
                     return append_kept_keys({e.new_scores.view(), e.positions.view()},
                                             {e.kept_indices.view(), e.kept_scores.view()}, e.lists.view(),
                                             selection_context(context));
                   }});
  calls.push_back({"plan_report", [](const Everything& e, const AttentionContext& context) {
                     PlanReport report;
                     return plan_report(e.call.inputs(), e.call.options, &report, context);
                   }});
  calls.push_back({"plan_chunks", [](const Everything& e, const AttentionContext& context) {
                     std::vector<PlannedChunk> chunks;
                     return plan_chunks(e.call.inputs(), e.call.options, 0, 0, &chunks, context);
                   }});
  calls.push_back({"mask_intervals", [](const Everything& e, const AttentionContext& context) {
                     bool exact = false;
                     return mask_intervals(e.mask.view(), false, e.intervals(), &exact, selection_context(context));
                   }});
  return calls;
}

TEST(PublicCalls, WriteTheirResultsSomewhere) {
  const Everything e;
  constexpr const char* kRule = " must point to where the result goes; got null";
  for (const auto& [name, call] : kBytesCalls) {
    EXPECT_EQ(call(e, {}, nullptr).message(), std::string("bytes") + kRule) << name;
  }
  const AttentionInputs inputs = e.call.inputs();
  EXPECT_EQ(plan_report(inputs, {}, nullptr).message(), std::string("report") + kRule);
  EXPECT_EQ(plan_report(inputs, {}, nullptr, nullptr, 0).message(), std::string("report") + kRule);
  EXPECT_EQ(plan_chunks(inputs, {}, 0, 0, nullptr).message(), std::string("chunks") + kRule);
  const TensorView mask = e.mask.view();
  EXPECT_EQ(mask_intervals(mask, false, e.intervals(), nullptr).message(), std::string("exact") + kRule);
  EXPECT_EQ(mask_intervals(mask, false, e.intervals(), nullptr, nullptr, 0).message(), std::string("exact") + kRule);
}

TEST(PublicCalls, RunOnDevicesThatAreKnown) {
  const Everything e;
  for (const PublicCall& call : public_calls()) {
    if (call.name == kOnNoDevice) continue;
    EXPECT_EQ(call.run(e, {.device = {static_cast<Device::Kind>(7), nullptr}}).message(),
              "device.kind must be kCpu or kCuda; got device.kind 7")
        << call.name;
    EXPECT_EQ(call.run(e, {}).message(), "ok") << call.name;
  }
}

// Every allocation of every call fails once, with every argument and every kind of forward.
class MemoryThatRunsOut : public ::testing::TestWithParam<std::tuple<Variant, DType>> {};

TEST_P(MemoryThatRunsOut, IsAStatusAndTheNextCallWorks) {
  const auto& [variant, dtype] = GetParam();
  internal::ThreadPool pool(2);
  const Everything e(variant, dtype);
  for (const PublicCall& call : public_calls()) {
    if (dtype == DType::kFloat64 && call.name == "plan_chunks") continue;  // which refuses it
    for (std::int64_t allowed = 0;; ++allowed) {
      ASSERT_LT(allowed, 10000) << call.name;
      allocations_left = allowed;
      const Status status = call.run(e, {.executor = &pool});
      const bool ran_out = allocations_left == 0;
      allocations_left = -1;
      if (status.ok()) break;
      ASSERT_TRUE(ran_out && status.is_failure()) << call.name << ": " << status.message();
      ASSERT_EQ(status.argument(), "allocation");
    }
    EXPECT_EQ(call.run(e, {.executor = &pool}).message(), "ok") << call.name << " afterwards";
  }
}

INSTANTIATE_TEST_SUITE_P(PublicCalls, MemoryThatRunsOut,
                         ::testing::Combine(::testing::ValuesIn(kVariants),
                                            ::testing::Values(DType::kFloat32, DType::kBFloat16, DType::kFloat64)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "_" + name_of(std::get<1>(info.param));
                         });

TEST(PublicCalls, SayHowMuchWorkspaceThereIsNone) {
  const Everything e;
  // As many workers as would need more memory than any machine has.
  testing::SerialExecutor executor(1 << 30);
  AttentionInputs inputs = e.call.inputs();
  inputs.visibility = {};
  inputs.bias = {};
  constexpr std::int64_t kRows = std::int64_t{1} << 29;
  for (TensorView* view : {&inputs.query, &inputs.key, &inputs.value}) {
    view->shape = {1, kRows, 1, 64};
    view->strides = {0, 0, 0, 1};
  }
  AttentionOutputs outputs;
  outputs.out = contiguous_view(inputs.query.data, DType::kFloat32, 1, kRows, 1, 64);
  outputs.lse = contiguous_view(inputs.query.data, DType::kFloat32, 1, 1, kRows);
  std::size_t bytes = 0;
  ASSERT_TRUE(attention_forward_workspace(inputs, {}, {.executor = &executor}, &bytes).ok());
  const Status status = attention_forward(inputs, {}, outputs, {.executor = &executor});
  EXPECT_TRUE(status.is_failure());
  EXPECT_EQ(status.message(),
            "allocation failed: " + std::to_string(bytes) + " bytes of workspace asked for, out of memory");
}

TEST(PublicCalls, ReportWhatAnExecutorThrows) {
  struct Broken final : Executor {
    int concurrency() const override { return 4; }
    void run(int, const std::function<void(int)>&) override { throw std::runtime_error("no threads today"); }
  } broken;
  const Everything e;
  const Status status = attention_forward(e.call.inputs(), {}, e.call.outputs(), {.executor = &broken});
  EXPECT_TRUE(status.is_failure());
  EXPECT_EQ(status.message(), "call failed: no threads today");
}

TEST(PublicCalls, HeadersAndLibraryAreOfOneVersion) {
  EXPECT_EQ(std::to_string(FLASH_DMATTN_VERSION_MAJOR) + "." + std::to_string(FLASH_DMATTN_VERSION_MINOR) + "." +
                std::to_string(FLASH_DMATTN_VERSION_PATCH),
            version());
  static_assert(FLASH_DMATTN_VERSION_NUMBER >= 20000);
}

}  // namespace
}  // namespace flash_dmattn
