// Calls of attention with memory of their own, for tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "flash_dmattn/attention.h"

namespace flash_dmattn::testing {

// A half or bfloat16 from a double that it represents exactly, as every random number here does.
inline std::uint16_t encode(DType dtype, double number) {
  if (std::isnan(number)) return 0x7fff;
  const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(number));
  if (dtype == DType::kBFloat16) return static_cast<std::uint16_t>(bits >> 16);
  if (number == 0) return 0;
  const std::uint32_t exponent = std::isinf(number) ? 31 : ((bits >> 23) & 0xff) - 127 + 15;
  return static_cast<std::uint16_t>(((bits >> 16) & 0x8000) | (exponent << 10) | ((bits >> 13) & 0x3ff));
}

inline double decode(DType dtype, std::uint16_t bits) {
  if (dtype == DType::kBFloat16) return std::bit_cast<float>(std::uint32_t{bits} << 16);
  const int exponent = (bits >> 10) & 31, fraction = bits & 0x3ff;
  double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25);
  if (exponent == 31) size = fraction == 0 ? HUGE_VAL : std::nan("");
  return bits & 0x8000 ? -size : size;
}

// The lowest finite number of a floating dtype.
inline double lowest_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return -65504.0;
    case DType::kBFloat16:
      return -0x1.fep127;
    case DType::kFloat32:
      return std::numeric_limits<float>::lowest();
    default:
      return std::numeric_limits<double>::lowest();
  }
}

// A contiguous tensor that owns exactly its elements, so that sanitizers see any access beside them.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::vector<std::int64_t> shape) : dtype_(dtype), shape_(std::move(shape)) {
    count_ = 1;
    for (const std::int64_t size : shape_) count_ *= static_cast<std::size_t>(size);
    bytes_.resize(count_ * size_of(dtype));
  }

  bool defined() const { return !shape_.empty(); }
  std::size_t count() const { return count_; }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  const std::vector<std::byte>& bytes() const { return bytes_; }

  TensorView view() const {
    TensorView view;
    if (!defined()) return view;
    view.data = const_cast<std::byte*>(bytes_.data());
    view.dtype = dtype_;
    view.rank = static_cast<int>(shape_.size());
    std::int64_t stride = 1;
    for (int dim = view.rank - 1; dim >= 0; --dim) {
      view.shape[dim] = shape_[static_cast<std::size_t>(dim)];
      view.strides[dim] = stride;
      stride *= view.shape[dim];
    }
    return view;
  }

  double get(std::size_t i) const {
    switch (dtype_) {
      case DType::kFloat64:
        return at<double>(i);
      case DType::kFloat32:
        return at<float>(i);
      case DType::kBool:
        return at<std::uint8_t>(i);
      case DType::kInt32:
        return at<std::int32_t>(i);
      default:
        return decode(dtype_, at<std::uint16_t>(i));
    }
  }

  void set(std::size_t i, double number) {
    switch (dtype_) {
      case DType::kFloat64:
        return put<double>(i, number);
      case DType::kFloat32:
        return put<float>(i, static_cast<float>(number));
      case DType::kBool:
        return put<std::uint8_t>(i, number != 0);
      case DType::kInt32:
        return put<std::int32_t>(i, static_cast<std::int32_t>(number));
      default:
        return put<std::uint16_t>(i, encode(dtype_, number));
    }
  }

  void fill(const std::function<double()>& number) {
    for (std::size_t i = 0; i < count_; ++i) set(i, number());
  }

  Tensor as(DType dtype) const {
    if (!defined()) return {};
    Tensor result(dtype, shape_);
    for (std::size_t i = 0; i < count_; ++i) result.set(i, get(i));
    return result;
  }

 private:
  template <typename T>
  const T& at(std::size_t i) const {
    return reinterpret_cast<const T*>(bytes_.data())[i];
  }
  template <typename T>
  void put(std::size_t i, T number) {
    reinterpret_cast<T*>(bytes_.data())[i] = number;
  }

  DType dtype_ = DType::kFloat32;
  std::vector<std::int64_t> shape_;
  std::size_t count_ = 0;
  std::vector<std::byte> bytes_;
};

// Those that kernels compute in, beside fp64, which they are held to.
inline constexpr DType kKernelDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

struct Shape {
  std::int64_t batch, rows, keys, heads, key_heads, head_dim;
  std::int64_t value_dim = head_dim;
};

// What a test varies. Empty shapes and lists mean "none".
struct Variant {
  std::string name;
  Shape shape{2, 5, 7, 4, 2, 3};
  std::vector<std::int64_t> mask = {}, bias = {};
  std::vector<int> seqlens = {};
  bool is_causal = false;
  double softcap = 0;
  double density = 0.6;  // of visible keys in the mask
  bool float_bias = false;
  std::vector<std::int64_t> intervals = {};  // (B or 1, heads or 1, Sk)
  std::vector<std::int64_t> indices = {};    // of lists of keys
  bool has_lengths = false;                  // of the lists
  std::int64_t block_size = 1;
  bool sink = false, float_sink = false;
};

inline void PrintTo(const Variant& variant, std::ostream* os) { *os << variant.name; }

inline std::string name_of_variant(const ::testing::TestParamInfo<Variant>& info) { return info.param.name; }

inline void expect_same_counters(const AttentionCounters& got, const AttentionCounters& expected) {
  EXPECT_EQ(got.tiles_visited, expected.tiles_visited);
  EXPECT_EQ(got.tiles_partial, expected.tiles_partial);
  EXPECT_EQ(got.tiles_empty, expected.tiles_empty);
  EXPECT_EQ(got.kept_scores, expected.kept_scores);
  EXPECT_EQ(got.computed_scores, expected.computed_scores);
  EXPECT_EQ(got.copied_keys, expected.copied_keys);
  EXPECT_EQ(got.plans, expected.plans);
  EXPECT_EQ(got.lists, expected.lists);
  EXPECT_EQ(got.bitmaps, expected.bitmaps);
  EXPECT_EQ(got, expected);  // whatever is added later
}

// Runs the tasks one after another as any number of workers, last one first.
class SerialExecutor : public Executor {
 public:
  explicit SerialExecutor(int workers) : workers_(workers) {}
  int concurrency() const override { return workers_; }
  void run(int workers, const std::function<void(int)>& task) override {
    for (int worker = workers - 1; worker >= 0; --worker) task(worker);
  }

 private:
  int workers_;
};

// The tensors of a forward and backward call.
struct Call {
  Tensor query, key, value, mask, bias, sink, seqlens, begins, ends, indices, lengths, dout, dlse;
  Tensor out, lse, row_stats, dquery, dkey, dvalue, dbias, dsink;
  bool is_causal = false;
  std::int64_t block_size = 1;
  AttentionOptions options;

  Call(const Variant& variant, DType dtype, unsigned seed = 1) {
    const Shape& s = variant.shape;
    std::mt19937 random(seed);
    // Multiples of 1/32 below 4: exact in every dtype.
    const auto number = [&] { return (static_cast<int>(random() % 255) - 127) / 32.0; };
    const auto tensor = [&](std::vector<std::int64_t> shape) {
      Tensor result(dtype, std::move(shape));
      result.fill(number);
      return result;
    };
    query = tensor({s.batch, s.rows, s.heads, s.head_dim});
    key = tensor({s.batch, s.keys, s.key_heads, s.head_dim});
    value = tensor({s.batch, s.keys, s.key_heads, s.value_dim});
    dout = tensor({s.batch, s.rows, s.heads, s.value_dim});
    dlse = tensor({s.batch, s.heads, s.rows}).as(dtype == DType::kFloat64 ? dtype : DType::kFloat32);
    if (!variant.bias.empty()) bias = tensor(variant.bias).as(variant.float_bias ? DType::kFloat32 : dtype);
    if (variant.sink || variant.float_sink) sink = tensor({s.heads}).as(variant.float_sink ? DType::kFloat32 : dtype);
    if (!variant.mask.empty()) {
      mask = Tensor(DType::kBool, variant.mask);
      mask.fill([&] { return static_cast<double>(random() % 1000 < variant.density * 1000); });
    }
    if (!variant.seqlens.empty()) {
      seqlens = Tensor(DType::kInt32, {s.batch});
      for (std::size_t b = 0; b < variant.seqlens.size(); ++b) seqlens.set(b, variant.seqlens[b]);
    }
    if (!variant.intervals.empty()) {
      // Some begin before the first row, some end behind the last, some are empty.
      begins = ends = Tensor(DType::kInt32, variant.intervals);
      const auto rows = static_cast<unsigned>(s.rows);
      begins.fill([&] { return static_cast<double>(random() % (rows + 3)) - 2; });
      for (std::size_t i = 0; i < ends.count(); ++i) {
        ends.set(i, begins.get(i) + static_cast<double>(random() % (rows + 2)) - 1);
      }
    }
    if (!variant.indices.empty()) {
      // Some entries lie outside of the keys, some are there twice.
      const std::int64_t blocks = s.keys / variant.block_size + 1;
      indices = Tensor(DType::kInt32, variant.indices);
      indices.fill([&] { return static_cast<double>(random() % static_cast<unsigned>(blocks + 3)) - 2; });
      block_size = variant.block_size;
    }
    if (variant.has_lengths) {
      lengths = Tensor(DType::kInt32, {variant.indices[0], variant.indices[1], variant.indices[2]});
      lengths.fill([&] { return static_cast<double>(random() % static_cast<unsigned>(variant.indices[3] + 4)) - 2; });
    }
    options.softcap = variant.softcap;
    is_causal = variant.is_causal;
    options.scale = 0.5 / std::sqrt(static_cast<double>(s.head_dim));
    make_results();
  }

  // The same numbers in double precision.
  Call in_float64() const {
    Call result = *this;
    for (Tensor* tensor :
         {&result.query, &result.key, &result.value, &result.bias, &result.sink, &result.dout, &result.dlse}) {
      *tensor = tensor->as(DType::kFloat64);
    }
    result.make_results();
    return result;
  }

  void make_results() {
    out = Tensor(query.dtype(), dout.shape());
    lse = Tensor(dlse.dtype(), dlse.shape());
    row_stats = Tensor(dlse.dtype(), {dlse.shape()[0], dlse.shape()[1], dlse.shape()[2], 2});
    dquery = Tensor(query.dtype(), query.shape());
    dkey = Tensor(query.dtype(), key.shape());
    dvalue = Tensor(query.dtype(), value.shape());
    if (bias.defined()) dbias = Tensor(bias.dtype(), bias.shape());
    if (sink.defined()) dsink = Tensor(sink.dtype(), sink.shape());
    // Whatever was there must not matter.
    for (Tensor* tensor : {&out, &lse, &row_stats, &dquery, &dkey, &dvalue, &dbias, &dsink})
      tensor->fill([] { return std::nan(""); });
  }

  AttentionInputs inputs() const {
    return {.query = query.view(),
            .key = key.view(),
            .value = value.view(),
            .bias = bias.view(),
            .sink = sink.view(),
            .visibility = {.mask = mask.view(),
                           .intervals = {begins.view(), ends.view()},
                           .indices = {indices.view(), lengths.view(), block_size},
                           .seqlens_k = seqlens.view(),
                           .is_causal = is_causal}};
  }
  AttentionOutputs outputs() const { return {out.view(), lse.view(), row_stats.view()}; }
  AttentionCotangents cotangents() const {
    return {out.view(), lse.view(), dout.view(), dlse.view(), row_stats.view()};
  }
  AttentionGradients gradients() const {
    return {dquery.view(), dkey.view(), dvalue.view(), dbias.view(), dsink.view()};
  }

  void run(const AttentionContext& context = {}) {
    const Status forward = attention_forward(inputs(), options, outputs(), context);
    ASSERT_EQ(forward.message(), "ok");
    const Status backward = attention_backward(inputs(), cotangents(), options, gradients(), context);
    ASSERT_EQ(backward.message(), "ok");
  }

  // Name and tensor of every result.
  std::vector<std::pair<std::string, const Tensor*>> results() const {
    std::vector<std::pair<std::string, const Tensor*>> list = {
        {"out", &out}, {"lse", &lse}, {"dquery", &dquery}, {"dkey", &dkey}, {"dvalue", &dvalue}};
    if (dbias.defined()) list.emplace_back("dbias", &dbias);
    if (dsink.defined()) list.emplace_back("dsink", &dsink);
    return list;
  }

  // Whether query head h's row sees key j, straight from the definition.
  bool visible(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t j) const {
    std::int64_t exist = key.shape()[1];
    if (seqlens.defined()) {
      exist = std::min(exist,
                       std::max(std::int64_t{0}, static_cast<std::int64_t>(seqlens.get(static_cast<std::size_t>(b)))));
    }
    if (j >= exist) return false;
    if (is_causal && j > row + exist - query.shape()[1]) return false;
    if (begins.defined()) {
      const std::size_t at = broadcast_index(begins, b, h, row, j);
      if (static_cast<double>(row) < begins.get(at) || static_cast<double>(row) >= ends.get(at)) return false;
    }
    if (indices.defined() && !is_listed(b, h, row, j)) return false;
    return !mask.defined() || mask.get(broadcast_index(mask, b, h, row, j)) != 0;
  }

  bool is_listed(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t j) const {
    if (indices.shape()[3] == 0) return false;
    const std::size_t list = broadcast_index(indices, b, h, row, 0);
    auto count = static_cast<double>(indices.shape()[3]);
    if (lengths.defined()) count = std::min(count, lengths.get(list / static_cast<std::size_t>(indices.shape()[3])));
    for (std::size_t e = 0; static_cast<double>(e) < count; ++e) {
      const auto first = static_cast<std::int64_t>(indices.get(list + e)) * block_size;
      if (first >= 0 && first <= j && j < first + block_size) return true;
    }
    return false;
  }

  // The element of a mask or bias, or of lists, that the score (b, h, row, j) reads.
  std::size_t broadcast_index(const Tensor& tensor, std::int64_t b, std::int64_t h, std::int64_t row,
                              std::int64_t j) const {
    std::vector<std::int64_t> s = tensor.shape();
    if (s.size() == 2) s = {1, 1, s[0], s[1]};
    if (s.size() == 3) s = {s[0], s[1], 1, s[2]};
    const std::int64_t head = s[1] == 1 ? 0 : h / (query.shape()[2] / s[1]);
    return static_cast<std::size_t>((((s[0] == 1 ? 0 : b) * s[1] + head) * s[2] + (s[2] == 1 ? 0 : row)) * s[3] +
                                    (s[3] == 1 ? 0 : j));
  }
};

// The same call in fp64.
inline Call reference_of(const Call& call) {
  Call reference = call.in_float64();
  reference.run();
  return reference;
}

// Scores, or rows of a sink, that an element of a gradient is summed over: most of it cancels.
inline double summands_of(const std::string& name, const Call& call) {
  const double rows = static_cast<double>(call.lse.count());
  const auto per_element = [](double count, const Tensor& tensor) {
    return count / static_cast<double>(std::max<std::size_t>(tensor.count(), 1));
  };
  if (name == "dsink") return per_element(rows, call.sink);
  return name == "dbias" ? per_element(rows * static_cast<double>(call.key.shape()[1]), call.bias) : 1;
}

// Root mean square error, relative to that of the values; any single error may be this much larger.
inline double tolerance(DType dtype) {
  return dtype == DType::kFloat32 ? 2e-6 : dtype == DType::kFloat16 ? 2e-3 : 1.2e-2;
}
inline constexpr double kWorstFactor = 20;
// Below this size values are what cancellation left, and relative errors mean nothing. A bias's gradient is
// a sum over as many scores as it has fewer elements than there are scores, a sink's over rows; most of it cancels.
inline constexpr double kTypicalSize = 0.01;
inline constexpr double kTypicalSummand = 0.3;

inline void expect_close(const Tensor& got, const Tensor& expected, double tolerance, const std::string& name,
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

inline double typical_size_of(const std::string& name, const Call& call) {
  const double summands = summands_of(name, call);
  return summands > 1 ? kTypicalSummand * std::sqrt(summands) : kTypicalSize;
}

inline void expect_results_close(const Call& got, const Call& expected) {
  const auto left = got.results(), right = expected.results();
  for (std::size_t i = 0; i < left.size(); ++i) {
    // lse is float32 and never goes through the dtype of the products.
    const auto& [name, tensor] = left[i];
    expect_close(*tensor, *right[i].second, tolerance(name == "lse" ? DType::kFloat32 : got.query.dtype()), name,
                 typical_size_of(name, got));
  }
}

inline void expect_same_bytes(const Call& left, const Call& right) {
  const auto a = left.results(), b = right.results();
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i].second->bytes(), b[i].second->bytes()) << a[i].first;
}

// Every key, value and bias that nobody sees, and the query and dout of every row that sees nothing, become NaN.
inline void poison_unseen(Call* call) {
  const auto &q = call->query.shape(), &k = call->key.shape();
  const std::int64_t group = q[2] / k[2];
  const auto rows_of = [](const Tensor& tensor) {
    return tensor.count() / static_cast<std::size_t>(tensor.shape()[3]);
  };
  std::vector<bool> seen_key(rows_of(call->key)), seen_row(rows_of(call->query)), seen_bias(call->bias.count());
  for (std::int64_t b = 0; b < q[0]; ++b) {
    for (std::int64_t h = 0; h < q[2]; ++h) {
      for (std::int64_t row = 0; row < q[1]; ++row) {
        for (std::int64_t j = 0; j < k[1]; ++j) {
          if (!call->visible(b, h, row, j)) continue;
          seen_key[static_cast<std::size_t>((b * k[1] + j) * k[2] + h / group)] = true;
          seen_row[static_cast<std::size_t>((b * q[1] + row) * q[2] + h)] = true;
          if (call->bias.defined()) seen_bias[call->broadcast_index(call->bias, b, h, row, j)] = true;
        }
      }
    }
  }
  const auto poison = [](Tensor* tensor, const std::vector<bool>& seen) {
    for (std::size_t i = 0; i < tensor->count(); ++i) {
      if (!seen[i / (tensor->count() / seen.size())]) tensor->set(i, std::nan(""));
    }
  };
  poison(&call->key, seen_key);
  poison(&call->value, seen_key);
  poison(&call->query, seen_row);
  poison(&call->dout, seen_row);
  if (call->bias.defined()) poison(&call->bias, seen_bias);
}

}  // namespace flash_dmattn::testing
