// What a call may be given and be asked for: memory, strides, executors, threads, nonsense.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "attention_testing.h"
#include "core/thread_pool.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);  // fuzz_attention.cpp

namespace flash_dmattn {
namespace {

using testing::Call;
using testing::kKernelDTypes;
using testing::SerialExecutor;
using testing::Tensor;
using testing::Variant;

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

TEST(Attention, SurvivesRandomCalls) {
  std::mt19937 random(11);
  std::vector<std::uint8_t> bytes(64);
  for (int i = 0; i < 400; ++i) {
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());  // aborts where something is wrong
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
