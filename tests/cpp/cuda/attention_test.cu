// The attention kernels of a GPU by the public interface, against the fp64 path of the CPU on the same numbers: forward
// and backward of whatever family takes the call (FLASH_DMATTN_ARCH chooses another). tests/python/gpu holds them to
// the full numerical bar on a GPU; as emulated.* these run on the CPU, too, where each case ends in seconds.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "attention_testing.h"
#include "plan_testing.h"
#include "random_calls.h"

namespace flash_dmattn {
namespace {

using internal::cuda::DeviceMemory;
using internal::cuda::expect_success;
using testing::Call;
using testing::expect_results_close;
using testing::reference_of;
using testing::Variant;

// Memory of the device in place of a call's tensors.
class OnDevice {
 public:
  // Whose elements the device reads, or writes.
  TensorView input(const testing::Tensor& tensor) {
    TensorView view = tensor.view();
    if (!tensor.defined()) return view;
    view.data = memory_.emplace_back(std::make_unique<DeviceMemory>(tensor.bytes()))->get();
    return view;
  }
  TensorView output(const testing::Tensor& tensor) {
    TensorView view = tensor.view();
    if (!tensor.defined()) return view;
    const std::size_t bytes = tensor.bytes().size();
    void* host = view.data;
    view.data = take(bytes);
    outputs_.push_back({host, view.data, bytes});
    return view;
  }
  void* take(std::size_t bytes) { return memory_.emplace_back(std::make_unique<DeviceMemory>(bytes))->get(); }
  void download() const {
    for (const auto& [host, device, bytes] : outputs_) {
      expect_success(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost));
    }
  }

 private:
  struct Output {
    void* host;
    void* device;
    std::size_t bytes;
  };
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::vector<Output> outputs_;
};

void run_on_device(const Call& call) {
  OnDevice device;
  AttentionInputs inputs = call.inputs();
  inputs.query = device.input(call.query), inputs.key = device.input(call.key), inputs.value = device.input(call.value);
  inputs.bias = device.input(call.bias), inputs.sink = device.input(call.sink);
  Visibility& visibility = inputs.visibility;
  visibility.mask = device.input(call.mask), visibility.seqlens_k = device.input(call.seqlens);
  visibility.intervals.begin = device.input(call.begins), visibility.intervals.end = device.input(call.ends);
  visibility.indices.indices = device.input(call.indices), visibility.indices.lengths = device.input(call.lengths);
  const AttentionOutputs outputs = {device.output(call.out), device.output(call.lse), device.output(call.row_stats)};
  const AttentionCotangents cotangents = {outputs.out, outputs.lse, device.input(call.dout), device.input(call.dlse),
                                          outputs.row_stats};
  const AttentionGradients gradients = {device.output(call.dquery), device.output(call.dkey),
                                        device.output(call.dvalue), device.output(call.dbias),
                                        device.output(call.dsink)};
  const AttentionContext context = {.device = Device::cuda(nullptr)};
  std::size_t bytes = 0;
  ASSERT_EQ(attention_forward_workspace(inputs, call.options, context, &bytes).message(), "ok");
  ASSERT_EQ(attention_forward(inputs, call.options, outputs, device.take(bytes), bytes, context).message(), "ok");
  ASSERT_EQ(attention_backward_workspace(inputs, cotangents, call.options, gradients, context, &bytes).message(), "ok");
  ASSERT_EQ(
      attention_backward(inputs, cotangents, call.options, gradients, device.take(bytes), bytes, context).message(),
      "ok");
  expect_success(cudaDeviceSynchronize());
  device.download();
}

struct DTypeVariant {
  DType dtype;
  Variant variant;
};
void PrintTo(const DTypeVariant& parameter, std::ostream* os) {
  *os << name_of(parameter.dtype) << " " << parameter.variant.name;
}
std::string name_of_parameter(const ::testing::TestParamInfo<DTypeVariant>& info) { return info.param.variant.name; }

// B, Sq, Sk, H, Hkv, D: a little more than tiles and chunks have.
const std::vector<Variant> kVariants = {
    {.name = "dense", .shape = {1, 200, 300, 2, 2, 64}},
    {.name = "dense_128", .shape = {1, 200, 300, 2, 1, 128}},
    {.name = "causal", .shape = {2, 300, 300, 2, 1, 64}, .is_causal = true},
    {.name = "causal_128", .shape = {1, 300, 300, 2, 1, 128}, .is_causal = true},
    {.name = "lengths", .shape = {3, 100, 270, 2, 1, 128}, .seqlens = {1, 0, 257}, .is_causal = true},
    {.name = "odd_head_dims", .shape = {1, 70, 150, 2, 1, 71, 50}, .is_causal = true},
    {.name = "wide_heads", .shape = {1, 150, 200, 2, 2, 192}, .is_causal = true},
    {.name = "narrow_values", .shape = {1, 200, 300, 4, 2, 192, 128}, .is_causal = true},
    {.name = "narrow_values_lists",
     .shape = {1, 200, 400, 2, 2, 192, 128},
     .is_causal = true,
     .indices = {1, 1, 200, 60}},
    {.name = "narrow_values_bias", .shape = {2, 70, 150, 2, 1, 192, 128}, .bias = {1, 2, 1, 150}, .seqlens = {150, 33}},
    {.name = "softcap", .shape = {1, 150, 200, 2, 1, 128}, .bias = {1, 2, 1, 200}, .softcap = 2.5},
    {.name = "key_bias", .shape = {2, 150, 200, 4, 2, 128}, .bias = {1, 2, 1, 200}, .is_causal = true},
    {.name = "sink", .shape = {1, 150, 200, 4, 2, 64}, .is_causal = true, .sink = true},
    {.name = "full_bias", .shape = {2, 200, 304, 2, 1, 128}, .bias = {2, 2, 200, 304}},
    {.name = "full_bias_causal", .shape = {1, 70, 136, 4, 2, 128}, .bias = {1, 4, 70, 136}, .is_causal = true},
    {.name = "full_bias_lengths", .shape = {3, 130, 200, 2, 2, 96}, .bias = {3, 2, 130, 200}, .seqlens = {200, 0, 150}},
    {.name = "full_bias_one_head", .shape = {1, 70, 136, 1, 1, 128}, .bias = {1, 1, 70, 136}, .is_causal = true},
    {.name = "bias_over_heads", .shape = {1, 200, 304, 2, 2, 64}, .bias = {1, 1, 200, 304}, .seqlens = {290}},
    {.name = "shared_bias", .shape = {2, 150, 200, 2, 1, 128}, .bias = {1, 1, 150, 200}, .is_causal = true},
    {.name = "bias_of_odd_rows", .shape = {1, 130, 201, 2, 1, 128}, .bias = {1, 2, 130, 201}},
    {.name = "full_mask", .shape = {1, 200, 300, 2, 1, 128}, .mask = {1, 2, 200, 300}, .density = 0.3},
    {.name = "sparse_mask", .shape = {1, 200, 300, 2, 1, 64}, .mask = {1, 1, 200, 300}, .density = 0.01},
    {.name = "key_mask", .shape = {2, 150, 500, 4, 2, 128}, .mask = {2, 2, 500}, .is_causal = true, .density = 0.1},
    {.name = "intervals", .shape = {2, 200, 400, 2, 1, 128}, .bias = {1, 2, 1, 400}, .intervals = {1, 1, 400}},
    {.name = "lists", .shape = {1, 200, 700, 4, 2, 64}, .is_causal = true, .indices = {1, 1, 200, 40}},
    {.name = "lists_of_blocks",
     .shape = {1, 200, 700, 2, 1, 128},
     .indices = {1, 1, 200, 3},
     .has_lengths = true,
     .block_size = 64},
};

std::vector<DTypeVariant> every_variant(DType dtype) {
  std::vector<DTypeVariant> list;
  for (const Variant& variant : kVariants) list.push_back({dtype, variant});
  return list;
}

class CudaAttention : public ::testing::TestWithParam<DTypeVariant> {
 protected:
  Call call_ = Call(GetParam().variant, GetParam().dtype);
};
// Of one dtype, as they take long where they are emulated.
class CudaAttentionOfOneDType : public CudaAttention {};

TEST_P(CudaAttention, AgreesWithFloat64) {
  run_on_device(call_);
  expect_results_close(call_, reference_of(call_));
}

TEST_P(CudaAttentionOfOneDType, UnseenNaNTouchesNothing) {
  testing::poison_unseen(&call_);
  run_on_device(call_);
  expect_results_close(call_, reference_of(call_));
}

TEST_P(CudaAttentionOfOneDType, DeterministicRunsHaveTheSameBits) {
  call_.options.deterministic = true;
  run_on_device(call_);
  expect_results_close(call_, reference_of(call_));
  Call again = call_;
  again.make_results();
  run_on_device(again);
  testing::expect_same_bytes(call_, again);
}

// Sizes around those of tiles, head dims that kernels copy in boxes and such that they do not.
const testing::RandomSizes kRandomSizes = {.row_counts = {1, 17, 64, 128, 129, 257},
                                           .key_counts = {1, 64, 128, 200, 513},
                                           .most_rows = 180,
                                           .most_keys = 250,
                                           .head_dims = {8, 40, 64, 72, 96, 127, 128, 192},
                                           .value_dims = {8, 64, 100, 128},
                                           .most_entries = 60};

// FLASH_DMATTN_RANDOM_CALLS="first count": of other seeds.
class RandomCudaAttention : public ::testing::TestWithParam<unsigned> {};

TEST_P(RandomCudaAttention, AgreesWithFloat64WhateverNobodySees) {
  unsigned seed = GetParam() * 10, count = 10;
  if (const char* seeds = std::getenv("FLASH_DMATTN_RANDOM_CALLS")) std::sscanf(seeds, "%u %u", &seed, &count);
  for (const unsigned end = seed + count; seed < end; ++seed) {
    std::mt19937 random(seed);
    std::vector<std::uint8_t> bytes(200);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    testing::Decisions decisions(bytes.data(), bytes.size());
    const DType dtype = decisions.byte() % 2 ? DType::kFloat16 : DType::kBFloat16;
    Variant variant = testing::make_variant(decisions, kRandomSizes);
    // What CUDA refuses beside lists.
    const std::size_t dims = variant.mask.size();
    if (!variant.indices.empty() && (dims == 2 || dims == 4) && variant.mask[dims - 2] != 1) variant.mask = {};
    Call call(variant, dtype, seed);
    call.options.deterministic = decisions.byte() % 4 == 0;
    const Call reference = reference_of(call);
    if (call.query.count() > 0 && decisions.byte() % 2) testing::poison_unseen(&call);
    run_on_device(call);
    EXPECT_EQ(testing::first_difference(call, reference), "") << "seed " << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomCudaAttention, ::testing::Range(0u, 10u));
INSTANTIATE_TEST_SUITE_P(BFloat16, CudaAttention, ::testing::ValuesIn(every_variant(DType::kBFloat16)),
                         name_of_parameter);
INSTANTIATE_TEST_SUITE_P(Float16, CudaAttention, ::testing::ValuesIn(every_variant(DType::kFloat16)),
                         name_of_parameter);
INSTANTIATE_TEST_SUITE_P(BFloat16, CudaAttentionOfOneDType, ::testing::ValuesIn(every_variant(DType::kBFloat16)),
                         name_of_parameter);

}  // namespace
}  // namespace flash_dmattn
