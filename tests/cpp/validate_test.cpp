#include "api/validate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);  // fuzz_validate.cpp

namespace flash_dmattn::internal {
namespace {

constexpr std::int64_t kHuge = std::int64_t{1} << 40;
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Validation touches no tensor memory, so that any address does.
template <typename... Sizes>
TensorView tensor(DType dtype, Sizes... sizes) {
  return contiguous_view(reinterpret_cast<void*>(std::uintptr_t{4096}), dtype, sizes...);
}

// B 2, Sq 16, Sk 24, H 8, Hkv 2, D 64, with everything that a backward can take.
struct Call {
  AttentionInputs inputs;
  AttentionOptions options;
  AttentionOutputs outputs;
  AttentionCotangents cotangents;
  AttentionGradients gradients;

  explicit Call(DType dtype = DType::kBFloat16, std::int64_t batch = 2, std::int64_t rows = 16, std::int64_t keys = 24,
                std::int64_t heads = 8, std::int64_t key_heads = 2, std::int64_t head_dim = 64) {
    const DType lse_dtype = dtype == DType::kFloat64 ? dtype : DType::kFloat32;
    const TensorView query_like = tensor(dtype, batch, rows, heads, head_dim);
    const TensorView key_like = tensor(dtype, batch, keys, key_heads, head_dim);
    const TensorView lse_like = tensor(lse_dtype, batch, heads, rows);
    inputs = {
        .query = query_like,
        .key = key_like,
        .value = key_like,
        .bias = tensor(dtype, 1, heads, rows, 1),
        .sink = tensor(DType::kFloat32, heads),
        .visibility = {.mask = tensor(DType::kBool, batch, 1, 1, keys), .seqlens_k = tensor(DType::kInt32, batch)}};
    outputs = {query_like, lse_like};
    cotangents = {query_like, lse_like, query_like, lse_like};
    gradients = {query_like, key_like, key_like, inputs.bias, inputs.sink};
  }

  Status forward() { return make_forward_problem(inputs, options, outputs, &forward_problem); }
  Status backward() { return make_backward_problem(inputs, cotangents, options, gradients, &backward_problem); }

  ForwardProblem forward_problem;
  BackwardProblem backward_problem;
};

TEST(Validate, AcceptsEveryDtype) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    Call call(dtype);
    EXPECT_EQ(call.forward().message(), "ok");
    EXPECT_EQ(call.backward().message(), "ok");
    call.inputs.bias.dtype = call.gradients.dbias.dtype = DType::kFloat32;
    call.inputs.sink.dtype = call.gradients.dsink.dtype = dtype;
    EXPECT_EQ(call.backward().message(), "ok");
  }
}

TEST(Validate, FillsTheProblem) {
  Call call;
  call.options = {.scale = {}, .softcap = 3.0, .deterministic = true};
  call.inputs.visibility.is_causal = true;
  call.inputs.query.strides = {7, 640, 80, 1};
  call.inputs.visibility.seqlens_k.strides[0] = 0;
  call.inputs.sink.strides[0] = -2;
  ASSERT_TRUE(call.backward().ok());
  const BackwardProblem& p = call.backward_problem;
  EXPECT_EQ(p.dtype, DType::kBFloat16);
  EXPECT_EQ((std::vector{p.batch, p.rows, p.keys, p.heads, p.key_heads, p.head_dim, p.group()}),
            (std::vector<std::int64_t>{2, 16, 24, 8, 2, 64, 4}));
  EXPECT_EQ((std::vector{p.query.batch_stride, p.query.token_stride, p.query.head_stride}),
            (std::vector<std::int64_t>{7, 640, 80}));
  EXPECT_DOUBLE_EQ(p.scale, 0.125);
  EXPECT_DOUBLE_EQ(p.softcap, 3.0);
  EXPECT_TRUE(p.visibility.is_causal && p.deterministic);
  EXPECT_EQ(p.visibility.seqlens_stride, 0);
  EXPECT_TRUE(p.dquery.defined() && p.dkey.defined() && p.dvalue.defined() && p.dbias.defined());
  EXPECT_EQ(p.dlse_row_stride, 1);
  EXPECT_EQ(p.sink.data, call.inputs.sink.data);
  EXPECT_EQ(p.sink.stride, -2);
  EXPECT_EQ(p.dsink.data, call.gradients.dsink.data);
  EXPECT_EQ(p.dsink.dtype, DType::kFloat32);
}

TEST(Validate, ValuesMayHaveAnotherHeadDim) {
  Call call;
  call.inputs.value = call.gradients.dvalue = tensor(DType::kBFloat16, 2, 24, 2, 96);
  call.outputs.out = call.cotangents.out = call.cotangents.dout = tensor(DType::kBFloat16, 2, 16, 8, 96);
  ASSERT_EQ(call.forward().message(), "ok");
  ASSERT_EQ(call.backward().message(), "ok");
  EXPECT_EQ(call.backward_problem.head_dim, 64);
  EXPECT_EQ(call.backward_problem.value_dim, 96);
  EXPECT_DOUBLE_EQ(call.backward_problem.scale, 0.125);
}

TEST(Validate, ReadsEveryBroadcastForm) {
  Call call;
  struct {
    TensorView view;
    std::vector<std::int64_t> sizes, strides;
    std::int64_t head_divisor;
  } forms[] = {
      {tensor(DType::kBool, 2, 8, 16, 24), {2, 8, 16, 24}, {3072, 384, 24, 1}, 1},
      {tensor(DType::kBool, 2, 2, 16, 24), {2, 2, 16, 24}, {768, 384, 24, 1}, 4},
      {tensor(DType::kBool, 1, 1, 16, 1), {1, 1, 16, 1}, {0, 0, 1, 0}, 8},
      {tensor(DType::kBool, 2, 2, 24), {2, 2, 1, 24}, {48, 24, 0, 1}, 4},
      {tensor(DType::kBool, 1, 8, 1), {1, 8, 1, 1}, {0, 1, 0, 0}, 1},
      {tensor(DType::kBool, 16, 24), {1, 1, 16, 24}, {0, 0, 24, 1}, 8},
      {tensor(DType::kBool, 1, 24), {1, 1, 1, 24}, {0, 0, 0, 1}, 8},
  };
  for (auto& [view, sizes, strides, head_divisor] : forms) {
    call.inputs.visibility.mask = view;
    ASSERT_EQ(call.forward().message(), "ok");
    const BroadcastView& mask = call.forward_problem.visibility.mask;
    EXPECT_EQ((std::vector{mask.batches, mask.heads, mask.rows, mask.keys}), sizes);
    EXPECT_EQ((std::vector{mask.batch_stride, mask.head_stride, mask.row_stride, mask.key_stride}), strides);
    EXPECT_EQ(mask.head_divisor, head_divisor);
  }
}

TEST(Validate, TakesAPlanAsItIs) {
  Call call;
  ASSERT_EQ(call.forward().message(), "ok");
  EXPECT_EQ(call.forward_problem.visibility.plan.data, nullptr);
  call.inputs.visibility.plan = {reinterpret_cast<void*>(std::uintptr_t{4096}), 128};
  ASSERT_EQ(call.forward().message(), "ok");
  ASSERT_EQ(call.backward().message(), "ok");
  EXPECT_EQ(call.forward_problem.visibility.plan.data, call.inputs.visibility.plan.data);
  EXPECT_EQ(call.forward_problem.visibility.plan.bytes, 128u);
  EXPECT_EQ(call.backward_problem.visibility.plan.data, call.inputs.visibility.plan.data);
}

TEST(Validate, OptionalTensorsMayBeMissing) {
  Call call;
  call.inputs.visibility.mask = call.inputs.bias = call.inputs.sink = {};
  call.inputs.visibility.seqlens_k = call.cotangents.dlse = {};
  call.gradients = {};
  ASSERT_EQ(call.forward().message(), "ok");
  ASSERT_EQ(call.backward().message(), "ok");
  const BackwardProblem& p = call.backward_problem;
  EXPECT_FALSE(p.visibility.mask.defined() || p.bias.defined() || p.visibility.seqlens != nullptr || p.dlse != nullptr);
  EXPECT_FALSE(p.dquery.defined() || p.dkey.defined() || p.dvalue.defined() || p.dbias.defined());
  EXPECT_FALSE(p.sink.defined() || p.dsink.defined());
}

TEST(Validate, AcceptsZeroSizes) {
  for (int zero = 0; zero < 5; ++zero) {
    std::int64_t sizes[] = {2, 16, 24, 8, 2};
    sizes[zero] = 0;
    if (zero == 4) sizes[3] = 0;  // no key head: then no query head either
    Call call(DType::kFloat32, sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]);
    EXPECT_EQ(call.forward().message(), "ok") << zero;
    EXPECT_EQ(call.backward().message(), "ok") << zero;
    EXPECT_GT(call.backward_problem.bias.head_divisor, 0);
    EXPECT_GT(call.backward_problem.group(), zero == 3 ? -1 : 0);
  }
  Call call(DType::kFloat32, 2, 16, 0);
  call.inputs.key.data = call.inputs.value.data = nullptr;
  EXPECT_EQ(call.forward().message(), "ok") << "no elements, no data";
}

TEST(Validate, AcceptsAnyStridesOfInputs) {
  Call call;
  call.inputs.visibility.mask = tensor(DType::kBool, 2, 8, 16, 24);
  call.inputs.visibility.mask.strides = {0, 0, 0, -3};
  call.inputs.key.strides = {0, 0, 0, 1};
  call.inputs.query.data = reinterpret_cast<void*>(std::uintptr_t{4098});  // aligned to its elements, no more
  call.cotangents.dout.strides = {5, 0, 3, 1};
  call.cotangents.dlse.strides = {0, 0, 0};
  EXPECT_EQ(call.backward().message(), "ok");
}

// The inputs expanded from one token: no sizes fit more memory.
void set_heads(Call* call, std::int64_t batch, std::int64_t heads, std::int64_t key_heads) {
  for (TensorView* view : {&call->inputs.query, &call->inputs.key, &call->inputs.value}) {
    view->shape[0] = batch;
    view->shape[2] = view == &call->inputs.query ? heads : key_heads;
    view->strides = {0, 0, 0, 1};
  }
}

struct Mistake {
  std::string message;
  std::function<void(Call&)> make;
};

class Mistakes : public testing::TestWithParam<Mistake> {};

TEST_P(Mistakes, NameTheArgumentTheRuleAndTheValues) {
  Call call;
  GetParam().make(call);
  const Status forward = call.forward(), backward = call.backward();
  EXPECT_EQ((forward.ok() ? backward : forward).message(), GetParam().message);
}

const Mistake kMistakes[] = {
    {"query must be given; got query without a tensor", [](Call& c) { c.inputs.query = {}; }},
    {"key must have 4 dimensions; got key (2, 24, 64)",
     [](Call& c) { c.inputs.key = tensor(DType::kBFloat16, 2, 24, 64); }},
    {"value must have 4 dimensions; got value with 9 dimensions", [](Call& c) { c.inputs.value.rank = 9; }},
    {"query must be float16, bfloat16, float32 or float64; got query int32",
     [](Call& c) { c.inputs.query.dtype = DType::kInt32; }},
    {"key must have query's dtype; got key float16, query bfloat16",
     [](Call& c) { c.inputs.key.dtype = DType::kFloat16; }},
    {"query must not have a negative size; got query (2, -16, 8, 64)", [](Call& c) { c.inputs.query.shape[1] = -16; }},
    {"query must have stride 1 in its head dim; got query (2, 16, 8, 64) with strides (8192, 512, 64, 2)",
     [](Call& c) { c.inputs.query.strides[3] = 2; }},
    {"value must have data; got value (2, 24, 2, 64) at a null pointer",
     [](Call& c) { c.inputs.value.data = nullptr; }},
    {"key must be aligned to its element size; got key bfloat16 unaligned",
     [](Call& c) { c.inputs.key.data = reinterpret_cast<void*>(std::uintptr_t{4097}); }},
    {"mask must be addressable with 64-bit offsets; got mask (2, 1, 1, 24) with strides "
     "(24, 24, 24, 9223372036854775807)",
     [](Call& c) { c.inputs.visibility.mask.strides[3] = std::numeric_limits<std::int64_t>::max(); }},
    {"query must be addressable with 64-bit offsets; got query (1099511627776, 1099511627776, 8, 64) with strides "
     "(0, 0, 64, 1)",
     [](Call& c) {
       c.inputs.query.shape = {kHuge, kHuge, 8, 64};
       c.inputs.query.strides = {0, 0, 64, 1};
     }},
    {"key must have fewer than 2^31 - 2048 positions; got key (2, 2147481600, 2, 64)",
     [](Call& c) {
       c.inputs.key.shape[1] = c.inputs.value.shape[1] = (std::int64_t{1} << 31) - 2048;
       for (TensorView* view : {&c.inputs.key, &c.inputs.value}) view->strides = {0, 0, 0, 1};
     }},
    {"query must have at most 65536 heads for each of key's; got query (2, 16, 65537, 64), key (2, 24, 1, 64)",
     [](Call& c) { set_heads(&c, 2, 65537, 1); }},
    {"query must have at most 65536 heads for each of key's; got query (2, 16, 2147483648, 64), key (2, 24, 1, 64)",
     [](Call& c) { set_heads(&c, 2, std::int64_t{1} << 31, 1); }},
    {"query must have fewer than 2^31 heads in all batch elements; got query (32768, 16, 65536, 64)",
     [](Call& c) { set_heads(&c, 32768, 65536, 1); }},
    {"query must have fewer than 2^31 heads in all batch elements; got query (1, 16, 1099511627776, 64)",
     [](Call& c) { set_heads(&c, 1, kHuge, kHuge); }},
    {"key must have fewer than 2^31 heads in all batch elements; got key (1, 24, 1099511627776, 64)",
     [](Call& c) { set_heads(&c, 1, 0, kHuge); }},
    {"query must have fewer than 2^44 positions in all heads and batch elements; got query (2, 134217728, 65536, 64)",
     [](Call& c) {
       c.inputs.query.shape[1] = std::int64_t{1} << 27;
       set_heads(&c, 2, 65536, 65536);
     }},
    {"key must have fewer than 2^44 positions in all heads and batch elements; got key (2, 134217728, 65536, 64)",
     [](Call& c) {
       c.inputs.key.shape[1] = c.inputs.value.shape[1] = std::int64_t{1} << 27;
       set_heads(&c, 2, 65536, 65536);
     }},
    {"key must have fewer than 2^44 positions for all heads of query and batch elements; got key (2, 134217728, 2, "
     "64), "
     "query (2, 16, 65536, 64)",
     [](Call& c) {
       c.inputs.key.shape[1] = c.inputs.value.shape[1] = std::int64_t{1} << 27;
       set_heads(&c, 2, 65536, 2);
     }},
    {"query must make fewer than 2^60 scores B * H * Sq * Sk with key; got query (2, 1073741824, 8, 64), key "
     "(2, 1073741824, 2, 64)",
     [](Call& c) {
       c.inputs.query.shape[1] = c.inputs.key.shape[1] = c.inputs.value.shape[1] = std::int64_t{1} << 30;
       for (TensorView* view : {&c.inputs.query, &c.inputs.key, &c.inputs.value}) view->strides = {0, 0, 0, 1};
     }},
    {"query must have a head dim of 1 to 256; got query (2, 16, 8, 257)",
     [](Call& c) { c.inputs.query.shape[3] = 257; }},
    {"query must have a head dim of 1 to 256; got query (2, 16, 8, 0)", [](Call& c) { c.inputs.query.shape[3] = 0; }},
    {"key must have query's batch size; got key (3, 24, 2, 64), query (2, 16, 8, 64)",
     [](Call& c) { c.inputs.key.shape[0] = 3; }},
    {"key must have query's head dim; got key (2, 24, 2, 32), query (2, 16, 8, 64)",
     [](Call& c) { c.inputs.key.shape[3] = 32; }},
    {"value must have key's shape but for the head dim; got value (2, 23, 2, 64), key (2, 24, 2, 64)",
     [](Call& c) { c.inputs.value.shape[1] = 23; }},
    {"value must have key's shape but for the head dim; got value (2, 24, 1, 32), key (2, 24, 2, 64)",
     [](Call& c) { c.inputs.value = tensor(DType::kBFloat16, 2, 24, 1, 32); }},
    {"value must have a head dim of 1 to 256; got value (2, 24, 2, 257)",
     [](Call& c) { c.inputs.value.shape[3] = 257; }},
    {"value must have a head dim of 1 to 256; got value (2, 24, 2, 0)", [](Call& c) { c.inputs.value.shape[3] = 0; }},
    {"out must have the shape (B, Sq, H, Dv) = (2, 16, 8, 32); got out (2, 16, 8, 64)",
     [](Call& c) { c.inputs.value.shape[3] = 32; }},
    {"dvalue must have the shape (B, Sk, Hkv, Dv) = (2, 24, 2, 64); got dvalue (2, 24, 2, 32)",
     [](Call& c) { c.gradients.dvalue = tensor(DType::kBFloat16, 2, 24, 2, 32); }},
    {"query must have a multiple of key's heads; got query (2, 16, 8, 64), key (2, 24, 3, 64)",
     [](Call& c) { c.inputs.key.shape[2] = c.inputs.value.shape[2] = 3; }},
    {"query must have a multiple of key's heads; got query (2, 16, 8, 64), key (2, 24, 0, 64)",
     [](Call& c) { c.inputs.key.shape[2] = c.inputs.value.shape[2] = 0; }},
    {"scale must be finite; got scale nan", [](Call& c) { c.options.scale = std::abs(kNaN); }},
    {"scale must be finite; got scale inf", [](Call& c) { c.options.scale = kInfinity; }},
    {"softcap must be finite and not negative; got softcap -1", [](Call& c) { c.options.softcap = -1; }},
    {"softcap must be finite and not negative; got softcap inf", [](Call& c) { c.options.softcap = kInfinity; }},
    {"softcap must be 0 or between 1e-30 and 1e30, but in float64; got softcap 1e-50",
     [](Call& c) { c.options.softcap = 1e-50; }},
    {"softcap must be 0 or between 1e-30 and 1e30, but in float64; got softcap 1e+31",
     [](Call& c) { c.options.softcap = 1e31; }},
    {"mask must have 2, 3 or 4 dimensions; got mask (24)",
     [](Call& c) { c.inputs.visibility.mask = tensor(DType::kBool, 24); }},
    {"mask must be bool; got mask float32", [](Call& c) { c.inputs.visibility.mask.dtype = DType::kFloat32; }},
    {"mask must broadcast to (B, H or Hkv, Sq, Sk) = (2, 8 or 2, 16, 24); got mask (2, 3, 16, 24)",
     [](Call& c) { c.inputs.visibility.mask = tensor(DType::kBool, 2, 3, 16, 24); }},
    {"mask must broadcast to (B, H or Hkv, Sq, Sk) = (2, 8 or 2, 16, 24); got mask (24, 16)",
     [](Call& c) { c.inputs.visibility.mask = tensor(DType::kBool, 24, 16); }},
    {"mask must broadcast to (B, H or Hkv, Sq, Sk) = (2, 8 or 2, 16, 24); got mask (2, 16, 24)",
     [](Call& c) { c.inputs.visibility.mask = tensor(DType::kBool, 2, 16, 24); }},
    {"mask must broadcast to (B, H or Hkv, Sq, Sk) = (2, 8 or 2, 16, 24); got mask (2, 24): if that is (B, Sk), "
     "make it (B, 1, Sk), in Python mask[:, None, :]",
     [](Call& c) { c.inputs.visibility.mask = tensor(DType::kBool, 2, 24); }},
    {"bias must broadcast to (B, H or Hkv, Sq, Sk) = (2, 8 or 2, 16, 24); got bias (2, 1, 1, 0)",
     [](Call& c) { c.inputs.bias = tensor(DType::kFloat32, 2, 1, 1, 0); }},
    {"bias must have query's dtype or float32; got bias float16, query bfloat16",
     [](Call& c) { c.inputs.bias.dtype = DType::kFloat16; }},
    {"indices must have 4 dimensions; got indices (2, 16, 5)",
     [](Call& c) { c.inputs.visibility.indices = {tensor(DType::kInt32, 2, 16, 5)}; }},
    {"indices must be int32; got indices bool",
     [](Call& c) { c.inputs.visibility.indices = {tensor(DType::kBool, 2, 1, 16, 5)}; }},
    {"indices must broadcast to (B, H or Hkv, Sq, n) = (2, 8 or 2, 16, n); got indices (2, 3, 16, 5)",
     [](Call& c) { c.inputs.visibility.indices = {tensor(DType::kInt32, 2, 3, 16, 5)}; }},
    {"indices must broadcast to (B, H or Hkv, Sq, n) = (2, 8 or 2, 16, n); got indices (2, 1, 15, 5)",
     [](Call& c) { c.inputs.visibility.indices = {tensor(DType::kInt32, 2, 1, 15, 5)}; }},
    {"indices must have fewer than 2^31 - 2048 positions; got indices (1, 1, 1, 1099511627776)",
     [](Call& c) { c.inputs.visibility.indices = {tensor(DType::kInt32, 1, 1, 1, kHuge)}; }},
    {"indices must be given; got indices without a tensor",
     [](Call& c) { c.inputs.visibility.indices.lengths = tensor(DType::kInt32, 2, 1, 16); }},
    {"indices.lengths must have 3 dimensions; got indices.lengths (2, 16)",
     [](Call& c) { c.inputs.visibility.indices = {tensor(DType::kInt32, 2, 1, 16, 5), tensor(DType::kInt32, 2, 16)}; }},
    {"indices.lengths must broadcast to (B, H or Hkv, Sq) = (2, 8 or 2, 16); got indices.lengths (3, 1, 16)",
     [](Call& c) {
       c.inputs.visibility.indices = {tensor(DType::kInt32, 2, 1, 16, 5), tensor(DType::kInt32, 3, 1, 16)};
     }},
    {"indices.block_size must be between 1 and 2^31 - 1; got 0",
     [](Call& c) { c.inputs.visibility.indices = {tensor(DType::kInt32, 2, 1, 16, 5), {}, 0}; }},
    {"indices.block_size must be between 1 and 2^31 - 1; got 2147483648",
     [](Call& c) { c.inputs.visibility.indices = {tensor(DType::kInt32, 2, 1, 16, 5), {}, std::int64_t{1} << 31}; }},
    {"sink must have 1 dimension; got sink (1, 8)", [](Call& c) { c.inputs.sink = tensor(DType::kFloat32, 1, 8); }},
    {"sink must have query's dtype or float32; got sink float64, query bfloat16",
     [](Call& c) { c.inputs.sink.dtype = DType::kFloat64; }},
    {"sink must have the shape (H) = (8); got sink (2)", [](Call& c) { c.inputs.sink = tensor(DType::kFloat32, 2); }},
    {"sink must have data; got sink (8) at a null pointer", [](Call& c) { c.inputs.sink.data = nullptr; }},
    {"dsink needs a sink; got dsink (8), no sink", [](Call& c) { c.inputs.sink = {}; }},
    {"dsink must have the shape (H) = (8); got dsink (2)",
     [](Call& c) { c.gradients.dsink = tensor(DType::kFloat32, 2); }},
    {"dsink must be float32; got dsink bfloat16", [](Call& c) { c.gradients.dsink.dtype = DType::kBFloat16; }},
    {"dsink must be contiguous; got dsink (8) with strides (0)", [](Call& c) { c.gradients.dsink.strides[0] = 0; }},
    {"seqlens_k must have 1 dimension; got seqlens_k (2, 1)",
     [](Call& c) { c.inputs.visibility.seqlens_k = tensor(DType::kInt32, 2, 1); }},
    {"seqlens_k must be int32; got seqlens_k bool",
     [](Call& c) { c.inputs.visibility.seqlens_k.dtype = DType::kBool; }},
    {"seqlens_k must have the shape (B) = (2); got seqlens_k (3)",
     [](Call& c) { c.inputs.visibility.seqlens_k.shape[0] = 3; }},
    {"out must be given; got out without a tensor", [](Call& c) { c.outputs.out = {}; }},
    {"out must be bfloat16; got out float32", [](Call& c) { c.outputs.out.dtype = DType::kFloat32; }},
    {"out must be contiguous; got out (2, 16, 8, 64) with strides (8192, 64, 1024, 1)",
     [](Call& c) { c.outputs.out.strides = {8192, 64, 1024, 1}; }},
    {"lse must have the shape (B, H, Sq) = (2, 8, 16); got lse (2, 16, 8)",
     [](Call& c) { c.outputs.lse = tensor(DType::kFloat32, 2, 16, 8); }},
    {"lse must be float32; got lse bfloat16", [](Call& c) { c.cotangents.lse.dtype = DType::kBFloat16; }},
    {"dout must have the shape (B, Sq, H, Dv) = (2, 16, 8, 64); got dout (2, 16, 8, 32)",
     [](Call& c) { c.cotangents.dout.shape[3] = 32; }},
    {"dout must have stride 1 in its head dim; got dout (2, 16, 8, 64) with strides (0, 0, 0, 0)",
     [](Call& c) { c.cotangents.dout.strides = {}; }},
    {"dlse must be float32; got dlse float64", [](Call& c) { c.cotangents.dlse.dtype = DType::kFloat64; }},
    {"row_stats must have the shape (B, H, Sq, 2) = (2, 8, 16, 2); got row_stats (2, 8, 16, 3)",
     [](Call& c) { c.outputs.row_stats = tensor(DType::kFloat32, 2, 8, 16, 3); }},
    {"row_stats must be contiguous; got row_stats (2, 8, 16, 2) with strides (0, 0, 0, 1)",
     [](Call& c) {
       c.outputs.row_stats = tensor(DType::kFloat32, 2, 8, 16, 2);
       c.outputs.row_stats.strides = {0, 0, 0, 1};
     }},
    {"row_stats must be float32; got row_stats bfloat16",
     [](Call& c) { c.cotangents.row_stats = tensor(DType::kBFloat16, 2, 8, 16, 2); }},
    {"dquery must have data; got dquery (2, 16, 8, 64) at a null pointer",
     [](Call& c) { c.gradients.dquery.data = nullptr; }},
    {"dkey must have the shape (B, Sk, Hkv, D) = (2, 24, 2, 64); got dkey (2, 16, 8, 64)",
     [](Call& c) { c.gradients.dkey = c.gradients.dquery; }},
    {"dvalue must be contiguous; got dvalue (2, 24, 2, 64) with strides (3072, 64, 1536, 1)",
     [](Call& c) { c.gradients.dvalue.strides = {3072, 64, 1536, 1}; }},
    {"plan must have data; got 64 bytes at a null pointer", [](Call& c) { c.inputs.visibility.plan = {nullptr, 64}; }},
    {"plan must be aligned to 64 bytes; got plan unaligned",
     [](Call& c) { c.inputs.visibility.plan = {reinterpret_cast<void*>(std::uintptr_t{4096 + 32}), 64}; }},
    {"dbias needs a bias; got dbias (1, 8, 16, 1), no bias", [](Call& c) { c.inputs.bias = {}; }},
    {"dbias must have the shape of the bias = (1, 8, 16, 1); got dbias (2, 8, 16, 24)",
     [](Call& c) { c.gradients.dbias = tensor(DType::kBFloat16, 2, 8, 16, 24); }},
    {"dbias must be bfloat16; got dbias float32", [](Call& c) { c.gradients.dbias.dtype = DType::kFloat32; }},
};

INSTANTIATE_TEST_SUITE_P(Validate, Mistakes, testing::ValuesIn(kMistakes));

TEST(Validate, ScaleMustBeFiniteInTheDtypeOfTheScores) {
  Call low(DType::kFloat32), high(DType::kFloat64);
  low.options.scale = high.options.scale = 1e300;
  EXPECT_EQ(low.forward().argument(), "scale");
  EXPECT_TRUE(high.forward().ok());
}

TEST(Validate, SoftcapsOfFloat64MayBeOfAnySize) {
  Call call(DType::kFloat64);
  for (const double softcap : {1e-300, 1e300}) {
    call.options.softcap = softcap;
    EXPECT_TRUE(call.forward().ok()) << softcap;
  }
}

// (B, heads, Sk) of one element.
TensorView expanded(DType dtype, std::int64_t batch, std::int64_t heads, std::int64_t keys) {
  TensorView view = tensor(dtype, batch, heads, keys);
  view.strides = {};
  return view;
}

TEST(Validate, SelectionsCountTheirHeadsAndKeys) {
  SelectionProblem problem;
  const auto message = [&](std::int64_t batch, std::int64_t heads, std::int64_t keys) {
    return make_selection_problem({.scores = expanded(DType::kFloat16, batch, heads, keys)},
                                  {.window_size = 4, .seqlen_q = 4}, nullptr, &problem)
        .message();
  };
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  EXPECT_EQ(message(1, kLimit - 1, 4096), "ok");
  EXPECT_EQ(message(1, 2, kLimit - 2049), "ok");
  EXPECT_EQ(message(1, kLimit, 4),
            "scores must have fewer than 2^31 heads in all batch elements; got scores "
            "(1, 2147483648, 4)");
  EXPECT_EQ(message(kHuge, 1, 4),
            "scores must have fewer than 2^31 heads in all batch elements; got scores "
            "(1099511627776, 1, 4)");
  EXPECT_EQ(message(1, 2, kLimit - 2048),
            "scores must have fewer than 2^31 - 2048 positions; got scores "
            "(1, 2, 2147481600)");
  EXPECT_EQ(message(4, 65536, 1 << 26),
            "scores must have fewer than 2^44 positions in all heads and batch elements; "
            "got scores (4, 65536, 67108864)");
}

TEST(Validate, MasksForIntervalsCountTheirHeadsAndKeys) {
  MaskIntervalsProblem problem;
  const auto message = [&](std::int64_t batch, std::int64_t heads, std::int64_t rows, std::int64_t keys) {
    TensorView mask = tensor(DType::kBool, batch, heads, rows, keys);
    mask.strides = {};
    return make_mask_intervals_problem(mask, nullptr, &problem).message();
  };
  constexpr std::int64_t kLimit = std::int64_t{1} << 31;
  EXPECT_EQ(message(1, kLimit - 1, 4, 4), "ok");
  EXPECT_EQ(message(1, 1, kLimit - 2049, kLimit - 2049), "ok");
  EXPECT_EQ(message(1, kLimit, 4, 4),
            "mask must have fewer than 2^31 heads in all batch elements; got mask "
            "(1, 2147483648, 4, 4)");
  EXPECT_EQ(message(1, 1, kLimit - 2048, 4),
            "mask must have fewer than 2^31 - 2048 positions; got mask "
            "(1, 1, 2147481600, 4)");
  EXPECT_EQ(message(4, 65536, 1, 1 << 26),
            "mask must have fewer than 2^44 positions in all heads and batch elements; "
            "got mask (4, 65536, 1, 67108864)");
}

TEST(Validate, SurvivesRandomArguments) {
  std::mt19937 random(7);
  std::vector<std::uint8_t> bytes(512);
  for (int i = 0; i < 20000; ++i) {
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
    LLVMFuzzerTestOneInput(bytes.data(), i % 2 ? bytes.size() : random() % bytes.size());
  }
}

}  // namespace
}  // namespace flash_dmattn::internal
