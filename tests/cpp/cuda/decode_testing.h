// Cases of decoding, and what attention in double precision makes of them, one query row at a time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cuda/attention/score_rule.h"
#include "cuda/decode/decode.h"
#include "cuda/device_kernels.h"
#include "index_testing.h"
#include "plan_testing.h"
#include "rounds.h"

namespace flash_dmattn::internal::cuda {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// 16-bit numbers of either type.
struct Numbers {
  DType dtype;

  std::uint16_t bits(double value) const {
    if (dtype == DType::kBFloat16) return __bfloat16_as_ushort(__float2bfloat16(static_cast<float>(value)));
    return __half_as_ushort(__float2half(static_cast<float>(value)));
  }
  double value(std::uint16_t bits) const {
    if (dtype == DType::kBFloat16) return __bfloat162float(__ushort_as_bfloat16(bits));
    return __half2float(__ushort_as_half(bits));
  }
  double epsilon() const { return dtype == DType::kBFloat16 ? 0x1p-7 : 0x1p-10; }
};

// (B, S, heads, D) with gaps of NaN between tokens and heads. `aligned`: rows of a multiple of 8 elements begin at
// multiples of 16 bytes, and so are copied by other instructions than rows elsewhere.
struct Tokens {
  Numbers numbers;
  std::vector<std::uint16_t> host;
  TokenView view;
  std::int64_t first = 0;
  std::unique_ptr<DeviceMemory> device;

  Tokens() = default;
  Tokens(Rng& rng, Numbers numbers, std::int64_t batch, std::int64_t length, std::int64_t heads, std::int64_t head_dim,
         bool aligned)
      : numbers(numbers) {
    const auto gap = [&] {
      constexpr int kGaps[4] = {0, 8, 16, 3};
      return kGaps[rng() % (aligned ? 3 : 4)];
    };
    view.head_stride = head_dim + gap();
    view.token_stride = heads * view.head_stride + gap();
    if (rng() % 2 == 0) {  // heads outside
      view.token_stride = head_dim + gap();
      view.head_stride = length * view.token_stride + gap();
    }
    view.batch_stride = std::max(length * view.token_stride, heads * view.head_stride) + gap();
    first = gap();
    host.assign(static_cast<std::size_t>(first + batch * view.batch_stride), numbers.bits(kNaN));
    std::normal_distribution<double> normal;
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t token = 0; token < length; ++token)
        for (std::int64_t head = 0; head < heads; ++head)
          for (std::int64_t d = 0; d < head_dim; ++d) at(b, token, head, d) = numbers.bits(normal(rng));
  }
  std::uint16_t& at(std::int64_t b, std::int64_t token, std::int64_t head, std::int64_t d) {
    return host[static_cast<std::size_t>(first + b * view.batch_stride + token * view.token_stride +
                                         head * view.head_stride + d)];
  }
  double value(std::int64_t b, std::int64_t token, std::int64_t head, std::int64_t d) {
    return numbers.value(at(b, token, head, d));
  }
  void upload() {
    device = std::make_unique<DeviceMemory>(host);
    view.data = static_cast<std::uint16_t*>(device->get()) + first;
  }
};

inline bool is_aligned(const TokenView& view) {
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.batch_stride % 8 == 0 &&
         view.token_stride % 8 == 0 && view.head_stride % 8 == 0;
}

struct Expected {
  std::vector<double> out, magnitude;  // of a row; magnitude: what errors are relative to
  double lse = -kInfinity;
};

// Those of Hopper, which is not emulated.
inline bool device_has_clusters() {
#ifdef __CUDACC__
  return decode_gpu(current_gpu()).has_clusters;
#else
  return false;
#endif
}

struct Case {
  Numbers numbers{};
  Problem problem;  // sizes, lengths, causal rule, intervals, mask
  int head_dim = 0, value_dim = 0, processors = 1;
  bool has_clusters = false;
  double scale = 1, softcap = 0;
  bool fp32_bias = false;
  Tokens query, key, value;
  Tensor<float> bias_float;  // one of these two
  Tensor<std::uint16_t> bias;
  Lists lists;                      // not defined: none
  std::vector<std::uint8_t> named;  // (B, H, Sq, Sk): what the lists name

  bool sees(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t j) {
    const Sizes& sizes = problem.sizes;
    return problem.rules_show(b, h, row, j) && problem.mask_shows(b, h, row, j) &&
           (!lists.views.defined() ||
            named[static_cast<std::size_t>(((b * sizes.heads + h) * sizes.rows + row) * sizes.keys + j)] != 0);
  }
  void take_lists(Lists given) {
    lists = std::move(given);
    const Sizes& sizes = problem.sizes;
    named.assign(static_cast<std::size_t>(sizes.batch * sizes.heads * sizes.rows * sizes.keys), 0);
    auto row_names = named.begin();
    for (std::int64_t b = 0; b < sizes.batch; ++b)
      for (std::int64_t h = 0; h < sizes.heads; ++h)
        for (std::int64_t row = 0; row < sizes.rows; ++row, row_names += sizes.keys)
          for (std::int64_t i = 0; i < lists.count(b, h, row); ++i) {
            const std::int64_t first = lists.entries.at(b, h, row, i) * lists.views.block_size;
            const std::int64_t end = std::min(first + lists.views.block_size, sizes.keys);
            if (first >= 0 && first < end) std::fill(row_names + first, row_names + end, std::uint8_t{1});
          }
  }
  std::int64_t group() const { return problem.sizes.heads / problem.sizes.key_heads; }
  DecodeGpu gpu() const { return {processors, has_clusters}; }

  // Random ones, of the sizes: all of them aligned, or each as it happens.
  void make_tokens(Rng& rng) {
    const Sizes& sizes = problem.sizes;
    const bool aligned = rng() % 2 == 0;
    query = Tokens(rng, numbers, sizes.batch, sizes.rows, sizes.heads, head_dim, aligned);
    key = Tokens(rng, numbers, sizes.batch, sizes.keys, sizes.key_heads, head_dim, aligned);
    value = Tokens(rng, numbers, sizes.batch, sizes.keys, sizes.key_heads, value_dim, aligned);
  }

  // Hidden keys hold NaN, and so do bias entries that no score uses.
  void poison() {
    const Sizes& sizes = problem.sizes;
    std::vector<float> all_float(bias_float.host.size(), std::numeric_limits<float>::quiet_NaN());
    std::vector<std::uint16_t> all(bias.host.size(), numbers.bits(kNaN));
    std::swap(all_float, bias_float.host);
    std::swap(all, bias.host);
    const auto keep_bias = [&](std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t j) {
      if (!bias_float.host.empty()) {
        float* entry = &bias_float.at(b, h, row, j);
        *entry = all_float[static_cast<std::size_t>(entry - bias_float.host.data())];
      }
      if (!bias.host.empty()) {
        std::uint16_t* entry = &bias.at(b, h, row, j);
        *entry = all[static_cast<std::size_t>(entry - bias.host.data())];
      }
    };
    for (std::int64_t b = 0; b < sizes.batch; ++b)
      for (std::int64_t key_head = 0; key_head < sizes.key_heads; ++key_head)
        for (std::int64_t j = 0; j < sizes.keys; ++j) {
          bool seen = false;
          for (std::int64_t h = key_head * group(); h < (key_head + 1) * group(); ++h)
            for (std::int64_t row = 0; row < sizes.rows; ++row) {
              if (!sees(b, h, row, j)) continue;
              keep_bias(b, h, row, j);
              seen = true;
            }
          if (seen) continue;
          for (int d = 0; d < head_dim; ++d) key.at(b, j, key_head, d) = numbers.bits(kNaN);
          for (int d = 0; d < value_dim; ++d) value.at(b, j, key_head, d) = numbers.bits(kNaN);
        }
  }

  Expected expected(std::int64_t b, std::int64_t h, std::int64_t row) {
    std::vector<std::int64_t> seen;
    std::vector<double> scores;
    for (std::int64_t j = 0; j < problem.sizes.keys; ++j) {
      if (!sees(b, h, row, j)) continue;
      double score = 0;
      for (int d = 0; d < head_dim; ++d) score += query.value(b, row, h, d) * key.value(b, j, h / group(), d);
      score *= scale;
      if (softcap > 0) score = softcap * std::tanh(score / softcap);
      if (bias_float.defined()) score += bias_float.at(b, h, row, j);
      if (bias.defined()) score += numbers.value(bias.at(b, h, row, j));
      seen.push_back(j);
      scores.push_back(score);
    }
    Expected result;
    result.out.resize(static_cast<std::size_t>(value_dim));
    result.magnitude.resize(static_cast<std::size_t>(value_dim));
    if (seen.empty()) return result;
    const double highest = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (double& score : scores) sum += score = std::exp(score - highest);
    result.lse = highest + std::log(sum);
    for (std::size_t i = 0; i < seen.size(); ++i)
      for (int d = 0; d < value_dim; ++d) {
        const double part = scores[i] / sum * value.value(b, seen[i], h / group(), d);
        result.out[static_cast<std::size_t>(d)] += part;
        result.magnitude[static_cast<std::size_t>(d)] += std::abs(part);
      }
    return result;
  }
};

// What decides about the number of splits.
inline AttentionProblem shapes_of(const Case& c) {
  const Sizes& sizes = c.problem.sizes;
  AttentionProblem shapes;
  shapes.batch = sizes.batch, shapes.rows = sizes.rows, shapes.keys = sizes.keys;
  shapes.heads = sizes.heads, shapes.key_heads = sizes.key_heads, shapes.head_dim = c.head_dim;
  shapes.value_dim = c.value_dim;
  shapes.visibility.mask = c.problem.mask.view, shapes.visibility.intervals.begin = c.problem.visibility.begin;
  shapes.visibility.indices = c.lists.views;
  return shapes;
}

// What the kernels leave: out (B, Sq, H, Dv) and lse (B, H, Sq).
struct Result {
  std::vector<std::uint16_t> out;
  std::vector<float> lse;
};

inline Result run(Case& c, bool by_graph) {
  const Sizes& sizes = c.problem.sizes;
  c.query.upload(), c.key.upload(), c.value.upload();
  const bool has_bias = c.bias_float.defined() || c.bias.defined();
  if (c.bias_float.defined()) c.bias_float.upload();
  if (c.bias.defined()) c.bias.upload();
  DeviceMemory out(static_cast<std::size_t>(sizes.batch * sizes.rows * sizes.heads * c.value_dim) * 2);
  DeviceMemory lse(static_cast<std::size_t>(sizes.batch * sizes.heads * sizes.rows) * sizeof(float));
  ForwardParams params;
  params.query = c.query.view, params.key = c.key.view, params.value = c.value.view;
  params.bias = c.bias_float.defined() ? c.bias_float.view : c.bias.view;
  params.bias.dtype = c.bias_float.defined() ? DType::kFloat32 : c.numbers.dtype;
  params.batch = static_cast<std::int32_t>(sizes.batch), params.rows = static_cast<std::int32_t>(sizes.rows);
  params.keys = static_cast<std::int32_t>(sizes.keys), params.heads = static_cast<std::int32_t>(sizes.heads);
  params.key_heads = static_cast<std::int32_t>(sizes.key_heads), params.head_dim = c.head_dim;
  params.value_dim = c.value_dim;
  params.group = static_cast<std::int32_t>(c.group());
  params.score = score_rule_of(c.scale, c.softcap, has_bias);
  params.out = {out.get(), sizes.rows * sizes.heads * c.value_dim, sizes.heads * c.value_dim, c.value_dim};
  params.lse = static_cast<float*>(lse.get());
  params.aligned = c.head_dim % 8 == 0 && c.value_dim % 8 == 0 && is_aligned(params.query) && is_aligned(params.key) &&
                   is_aligned(params.value);
  params.mask = c.problem.mask.view;
  params.visibility = c.problem.visibility;

  DeviceMemory workspace(decode_workspace(shapes_of(c), c.gpu()));
  cudaStream_t stream;
  expect_success(cudaStreamCreate(&stream));
  if (by_graph) expect_success(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  expect_success(launch_decode(params, c.lists.views, c.numbers.dtype, c.gpu(), workspace.get(), stream));
  if (by_graph) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    expect_success(cudaStreamEndCapture(stream, &graph));
    expect_success(cudaGraphInstantiate(&executable, graph, 0));
    expect_success(cudaGraphLaunch(executable, stream));
    expect_success(cudaStreamSynchronize(stream));
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }
  expect_success(cudaStreamSynchronize(stream));
  cudaStreamDestroy(stream);
  return {to_host(static_cast<std::uint16_t*>(out.get()), sizes.batch * sizes.rows * sizes.heads * c.value_dim),
          to_host(static_cast<float*>(lse.get()), sizes.batch * sizes.heads * sizes.rows)};
}

// Rounding of probabilities and of the result is half an epsilon each; the rest is for sums in fp32.
inline void compare(Case& c, const Result& result) {
  const Sizes& sizes = c.problem.sizes;
  for (std::int64_t b = 0; b < sizes.batch; ++b)
    for (std::int64_t h = 0; h < sizes.heads; ++h)
      for (std::int64_t row = 0; row < sizes.rows; ++row) {
        const Expected expected = c.expected(b, h, row);
        const double lse = result.lse[static_cast<std::size_t>((b * sizes.heads + h) * sizes.rows + row)];
        SCOPED_TRACE("b " + std::to_string(b) + " h " + std::to_string(h) + " row " + std::to_string(row));
        if (std::isfinite(expected.lse)) {
          ASSERT_NEAR(lse, expected.lse, 1e-4 + 1e-5 * std::abs(expected.lse));
        } else {
          ASSERT_EQ(lse, expected.lse);
        }
        for (int d = 0; d < c.value_dim; ++d) {
          const auto index = static_cast<std::size_t>(((b * sizes.rows + row) * sizes.heads + h) * c.value_dim + d);
          const auto at = static_cast<std::size_t>(d);
          ASSERT_NEAR(c.numbers.value(result.out[index]), expected.out[at],
                      1.1 * c.numbers.epsilon() * expected.magnitude[at] + 1e-4 * expected.magnitude[at] + 1e-7)
              << "column " << d;
        }
      }
}

// Random tokens, nothing hidden.
inline Case plain_case(Rng& rng, DType dtype, const Sizes& sizes, int head_dim, double scale) {
  Case c;
  c.numbers.dtype = dtype;
  c.problem.sizes = sizes;
  c.problem.visibility.rows = static_cast<std::int32_t>(sizes.rows);
  c.problem.visibility.keys = static_cast<std::int32_t>(sizes.keys);
  c.head_dim = c.value_dim = head_dim, c.scale = scale;
  c.make_tokens(rng);
  return c;
}

// Lists are short, have many more entries than there are keys, or none.
inline Lists any_lists(Rng& rng, const Sizes& sizes) {
  constexpr std::int64_t kBlockSizes[] = {1, 1, 1, 2, 3, 33, 64, 200, 1100, std::numeric_limits<std::int32_t>::max()};
  const std::int64_t block_size = kBlockSizes[rng() % 10];
  const int count = rng() % 8 == 0 ? 0 : uniform(rng, 1, rng() % 4 == 0 ? 3000 : block_size > 3 ? 10 : 400);
  return random_lists(rng, sizes, count, rng() % 2 == 0, block_size);
}

inline Case random_case(Rng& rng, bool with_lists) {
  Case c;
  c.numbers.dtype = rng() % 2 == 0 ? DType::kBFloat16 : DType::kFloat16;
  Sizes& sizes = c.problem.sizes;
  sizes.batch = uniform(rng, 1, 2);
  sizes.key_heads = uniform(rng, 1, 2);
  sizes.heads = sizes.key_heads * uniform(rng, 1, 8);
  sizes.rows = rng() % 2 == 0 ? 1 : uniform(rng, 1, with_lists && rng() % 4 == 0 ? 16 : 4);
  sizes.keys = rng() % 4 == 0 ? uniform(rng, 1, 70) : uniform(rng, 1, 2500);
  if (rng() % 3 == 0) sizes.keys = (sizes.keys + 15) / 16 * 16;
  constexpr int kHeadDims[] = {32, 64, 96, 128, 192, 256, 8, 80, 33, 127, 1, 250};
  c.head_dim = c.value_dim = kHeadDims[rng() % 12];
  if (rng() % 2 == 0) c.value_dim = kHeadDims[rng() % 12];
  c.processors = rng() % 3 == 0 ? 1 : uniform(rng, 1, 132);
  c.has_clusters = device_has_clusters() && rng() % 2 == 0;
  c.scale = (rng() % 8 == 0 ? -1 : 1) / std::sqrt(c.head_dim);
  if (rng() % 4 == 0) c.softcap = 1.5;
  c.problem.causal = rng() % 2 == 0;
  if (rng() % 3 == 0) {
    for (int b = 0; b < sizes.batch; ++b) {
      c.problem.seqlens.push_back(rng() % 6 == 0 ? 0 : uniform(rng, -2, static_cast<int>(sizes.keys) + 2));
    }
  }
  if (rng() % 4 == 0) {
    constexpr Intervals kKinds[] = {Intervals::kRandom, Intervals::kWindow, Intervals::kDocuments};
    make_intervals(rng, c.problem, kKinds[rng() % 3], {uniform(rng, 0, 2), random_heads_form(rng), 0, 1},
                   random_layout(rng), uniform(rng, 1, 300));
  }
  if (rng() % 4 != 0 && (!with_lists || rng() % 2 == 0)) {
    constexpr int kPercents[] = {0, 1, 3, 20, 90, 100};
    c.problem.mask =
        make_mask(rng, sizes, {uniform(rng, 0, 2), random_heads_form(rng), uniform(rng, 0, 2), uniform(rng, 0, 3) % 2},
                  random_layout(rng), kPercents[rng() % 6]);
  }
  c.problem.visibility.rows = static_cast<std::int32_t>(sizes.rows);
  c.problem.visibility.keys = static_cast<std::int32_t>(sizes.keys);
  c.problem.visibility.is_causal = c.problem.causal;
  c.problem.visibility.begin = c.problem.begin.view, c.problem.visibility.end = c.problem.end.view;
  if (!c.problem.seqlens.empty()) {
    c.problem.device_seqlens = std::make_unique<DeviceMemory>(c.problem.seqlens);
    c.problem.visibility.seqlens = static_cast<const std::int32_t*>(c.problem.device_seqlens->get());
    c.problem.visibility.seqlens_stride = 1;
  }
  if (rng() % 2 == 0) {
    const std::array<int, 4> form = {uniform(rng, 0, 2), random_heads_form(rng), uniform(rng, 0, 2), 1};
    std::normal_distribution<float> normal;
    if (rng() % 2 == 0) {
      c.bias_float = make_tensor<float>(rng, sizes, form, random_layout(rng));
      for (float& value : c.bias_float.host) value = 3 * normal(rng);
      c.bias_float.view.data = c.bias_float.host.data();
    } else {
      c.bias = make_tensor<std::uint16_t>(rng, sizes, form, random_layout(rng));
      for (std::uint16_t& value : c.bias.host) value = c.numbers.bits(3 * normal(rng));
      c.bias.view.data = c.bias.host.data();
    }
  }
  c.make_tokens(rng);
  if (with_lists) c.take_lists(any_lists(rng, sizes));
  return c;
}

// Random cases of one set: what comes out, and that it comes out again.
inline void expect_agreement(int set, bool with_lists) {
  constexpr int kCases = 15;
  for (int i = 0; i < rounds(kCases); ++i) {
    const auto seed = static_cast<unsigned>(set * kCases + i);
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    Case c = random_case(rng, with_lists);
    c.poison();
    const Result result = run(c, i % 4 == 0);
    compare(c, result);
    if (testing::Test::HasFatalFailure()) return;
    const Result again = run(c, false);
    ASSERT_EQ(result.out, again.out);
    ASSERT_EQ(result.lse, again.lse);
  }
}

}  // namespace flash_dmattn::internal::cuda
