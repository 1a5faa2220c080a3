// What calls make of faults that are not theirs, by the public interface: captures that are given up, errors of others,
// streams that are destroyed early, a GPU that has failed.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "flash_dmattn/attention.h"
#include "flash_dmattn/selection.h"
#include "plan_testing.h"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr std::int64_t kTokens = 300, kHeads = 2;

// A selection, a forward and a backward that give the same bits in each run. All memory is there from the beginning:
// enqueue() does nothing that a capture forbids.
class Work {
 public:
  explicit Work(std::int64_t head_dim) {
    const auto random = [&] { return tokens(head_dim, true); };
    const auto result = [&] { return tokens(head_dim, false); };
    const auto rows = [&] { return contiguous_view(take(kHeads * kTokens * 4), DType::kFloat32, 1, kHeads, kTokens); };
    const auto bounds = [&] { return contiguous_view(take(kTokens * 4), DType::kInt32, 1, 1, kTokens); };
    selected_ = {.begin = bounds(), .end = bounds()};
    inputs_ = {.query = random(), .key = random(), .value = random()};
    inputs_.visibility.intervals = selected_;
    outputs_ = {.out = result(), .lse = rows()};
    cotangents_ = {.out = outputs_.out, .lse = outputs_.lse, .dout = random()};
    gradients_ = {.dquery = result(), .dkey = result(), .dvalue = result()};
    selection_inputs_.scores = contiguous_view(random().data, DType::kBFloat16, 1, 1, kTokens);

    const Device device = Device::cuda(nullptr);
    std::size_t bytes[3] = {};
    EXPECT_TRUE(select_keys_workspace(selection_inputs_, selection_, {.device = device}, &bytes[0]).ok());
    EXPECT_TRUE(attention_forward_workspace(inputs_, options_, {.device = device}, &bytes[1]).ok());
    EXPECT_TRUE(
        attention_backward_workspace(inputs_, cotangents_, options_, gradients_, {.device = device}, &bytes[2]).ok());
    for (int i = 0; i < 3; ++i) workspaces_[i] = {take(bytes[i]), bytes[i]};
    // What fills memory may be under way, and streams that block nothing do not wait for it: on a GPU that other
    // processes use as well it came as late as the kernels.
    expect_success(cudaDeviceSynchronize());
  }

  // The first Status that is not ok.
  Status enqueue(cudaStream_t stream) const {
    const Device device = Device::cuda(stream);
    const auto [for_selection, for_forward, for_backward] = workspaces_;
    if (const Status status = select_keys(selection_inputs_, selection_, selected_, for_selection.memory,
                                          for_selection.bytes, {.device = device});
        !status.ok()) {
      return status;
    }
    if (const Status status =
            attention_forward(inputs_, options_, outputs_, for_forward.memory, for_forward.bytes, {.device = device});
        !status.ok()) {
      return status;
    }
    return attention_backward(inputs_, cotangents_, options_, gradients_, for_backward.memory, for_backward.bytes,
                              {.device = device});
  }

  void clear_results() const {
    for (const auto& [data, bytes] : results_) expect_success(cudaMemset(data, 0xff, bytes));
    expect_success(cudaDeviceSynchronize());
  }

  std::vector<std::uint8_t> results() const {
    std::vector<std::uint8_t> all;
    for (const auto& [data, bytes] : results_) {
      const auto part = to_host(static_cast<const std::uint8_t*>(data), static_cast<std::int64_t>(bytes));
      all.insert(all.end(), part.begin(), part.end());
    }
    return all;
  }

 private:
  struct Workspace {
    void* memory;
    std::size_t bytes;
  };

  void* take(std::size_t bytes) { return memory_.emplace_back(std::make_unique<DeviceMemory>(bytes))->get(); }

  TensorView tokens(std::int64_t head_dim, bool random) {
    std::vector<std::uint16_t> numbers(static_cast<std::size_t>(kTokens * kHeads * head_dim));
    const std::size_t bytes = numbers.size() * sizeof(std::uint16_t);
    void* data = take(bytes);
    if (random) {  // bfloat16 of either sign, sizes .5 to 2
      for (auto& number : numbers) number = static_cast<std::uint16_t>((rng_() & 1) << 15 | (0x3f00 + (rng_() & 0xff)));
      expect_success(cudaMemcpy(data, numbers.data(), bytes, cudaMemcpyHostToDevice));
    } else {
      results_.emplace_back(data, bytes);
    }
    return contiguous_view(data, DType::kBFloat16, 1, kTokens, kHeads, head_dim);
  }

  Rng rng_{1};
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::vector<std::pair<void*, std::size_t>> results_;
  SelectionInputs selection_inputs_;
  SelectionOptions selection_{.window_size = 40, .seqlen_q = kTokens};
  KeyIntervals selected_;
  AttentionInputs inputs_;
  AttentionOptions options_{.deterministic = true};
  AttentionOutputs outputs_;
  AttentionCotangents cotangents_;
  AttentionGradients gradients_;
  Workspace workspaces_[3] = {};
};

// Head dims of either family, and of a narrow and a wide backward.
class Faults : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    expect_success(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    ASSERT_TRUE(work_.enqueue(stream_).ok());
    expect_success(cudaStreamSynchronize(stream_));
    expected_ = work_.results();
    work_.clear_results();
    ASSERT_NE(work_.results(), expected_);
  }
  void TearDown() override {
    if (stream_ != nullptr) expect_success(cudaStreamDestroy(stream_));
  }

  void expect_results(cudaStream_t stream) {
    const Status status = work_.enqueue(stream);
    EXPECT_TRUE(status.ok()) << status.message();
    expect_success(cudaStreamSynchronize(stream));
    EXPECT_EQ(work_.results(), expected_);
  }

  Work work_{GetParam()};
  cudaStream_t stream_ = nullptr;
  std::vector<std::uint8_t> expected_;
};

INSTANTIATE_TEST_SUITE_P(HeadDims, Faults, testing::Values(32, 64, 128, 256));

TEST_P(Faults, ACaptureThatIsGivenUpLeavesNothingBehind) {
  cudaGraph_t graph = nullptr;
  expect_success(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  EXPECT_TRUE(work_.enqueue(stream_).ok());
  expect_success(cudaStreamEndCapture(stream_, &graph));
  expect_success(cudaGraphDestroy(graph));
  expect_results(stream_);
}

TEST_P(Faults, ACaptureThatHasFailedIsAStatus) {
  expect_success(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  EXPECT_TRUE(work_.enqueue(stream_).ok());
  EXPECT_NE(cudaStreamSynchronize(stream_), cudaSuccess) << "a capture does not wait";
  EXPECT_NE(cudaGetLastError(), cudaSuccess);

  const Status status = work_.enqueue(stream_);
  EXPECT_TRUE(status.is_failure());
  EXPECT_EQ(status.message(), std::string("CUDA failed: ") + cudaGetErrorString(cudaErrorStreamCaptureInvalidated));
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "told by the Status, and left for the next caller to find";

  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorStreamCaptureInvalidated);
  static_cast<void>(cudaGetLastError());
  expect_results(stream_);
}

TEST_P(Faults, ErrorsOfOthersAreTheirs) {
  void* memory = nullptr;
  ASSERT_EQ(cudaMalloc(&memory, std::numeric_limits<std::size_t>::max() / 4), cudaErrorMemoryAllocation);
  const Status status = work_.enqueue(stream_);
  EXPECT_TRUE(status.ok()) << status.message();
  static_cast<void>(cudaGetLastError());
  expect_results(stream_);
}

TEST_P(Faults, WorkOfAStreamThatIsDestroyedIsDone) {
  const auto wait = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
  expect_success(cudaLaunchHostFunc(stream_, wait, nullptr));
  EXPECT_TRUE(work_.enqueue(stream_).ok());
  EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorNotReady) << "nothing is left to be cut off";
  static_cast<void>(cudaGetLastError());
  expect_success(cudaStreamDestroy(std::exchange(stream_, nullptr)));
  expect_success(cudaDeviceSynchronize());
  EXPECT_EQ(work_.results(), expected_);
}

__global__ void write_nowhere(int* nowhere) { *nowhere = 1; }

// A GPU that has failed stays so for a process: in a child, whose exit status says what it saw. Results are never read.
[[noreturn]] void call_after_failure(int head_dim) {
  auto* const work = new Work(head_dim);  // whose memory cannot be given back
  cudaStream_t stream = nullptr;
  if (cudaStreamCreate(&stream) != cudaSuccess || !work->enqueue(stream).ok()) std::exit(2);
  if (cudaStreamSynchronize(stream) != cudaSuccess) std::exit(3);
  write_nowhere<<<1, 1, 0, stream>>>(nullptr);
  // The failure may not be known yet: a call is told of it, or of nothing.
  const Status during = work->enqueue(stream);
  if (!during.ok() && !during.is_failure()) std::exit(4);
  if (cudaStreamSynchronize(stream) != cudaErrorIllegalAddress) std::exit(5);
  const Status after = work->enqueue(stream);
  std::exit(after.is_failure() && after.argument() == "CUDA" ? 0 : 6);
}

TEST(FaultsDeathTest, AGpuThatHasFailedIsAStatus) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // runs the program anew: no state of CUDA's outlives a fork
  for (const int head_dim : {32, 128}) EXPECT_EXIT(call_after_failure(head_dim), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace flash_dmattn::internal::cuda
