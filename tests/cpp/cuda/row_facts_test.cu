// What the backward knows of rows, and the gradients of sinks, against the same in double precision.
#include "cuda/attention/row_facts.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "plan_testing.h"
#include "rounds.h"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kMostLogGrowth = 100 * 0.6931471805599453;  // row_facts.cu: only so far is dlse divided by shares

float normal(Rng& rng) { return std::normal_distribution<float>()(rng); }

// A row as the forward leaves it, and what is expected of its facts.
struct Row {
  float highest = 0, log_sum = 0, lse = 0, dlse = 0;
  double delta = 0;
};

template <typename Element>
class Call {
 public:
  explicit Call(Rng& rng) {
    problem_.dtype = std::is_same_v<Element, __half> ? DType::kFloat16 : DType::kBFloat16;
    problem_.batch = uniform(rng, 1, 3), problem_.rows = uniform(rng, 1, 150), problem_.heads = uniform(rng, 1, 6);
    constexpr int kHeadDims[] = {1, 8, 20, 33, 64, 96, 128, 200, 256};
    problem_.head_dim = kHeadDims[rng() % 9];  // does not matter
    problem_.value_dim = kHeadDims[rng() % 9];
    constexpr int kRowTiles[] = {32, 64, 128};
    pass_.row_tile = kRowTiles[rng() % 3];
    pass_.sum_width = 32 << rng() % 4, clears_ = rng() % 2 == 0;
    pass_.natural = rng() % 2 == 0 ? 1.0f : 0.3f;
    has_stats_ = rng() % 4 != 0, has_dlse_ = rng() % 2 == 0, has_sink_ = rng() % 8 != 0;
    padded_rows_ = (problem_.rows + pass_.row_tile - 1) / pass_.row_tile * pass_.row_tile;
    make_sinks(rng);
    make_rows(rng);
  }

  std::string name() const {
    return std::to_string(problem_.batch) + " x " + std::to_string(problem_.rows) + " x " +
           std::to_string(problem_.heads) + " x " + std::to_string(problem_.value_dim) + (has_stats_ ? ", stats" : "") +
           (has_dlse_ ? ", dlse" : "") + (has_sink_ ? ", sinks" : "");
  }

  void run() {
    const auto rows = static_cast<std::size_t>(problem_.batch * problem_.heads * problem_.rows);
    const DeviceMemory out(out_), dout(dout_), lse(lse_), stats(stats_), dlse(dlse_), sinks(sinks_);
    const auto tokens = [&](const DeviceMemory& memory) {
      const std::int64_t token = problem_.heads * problem_.value_dim;
      return TokenView{memory.get(), problem_.rows * token, token, problem_.value_dim};
    };
    problem_.out = tokens(out), problem_.dout = tokens(dout);
    problem_.lse = lse.get();
    if (has_stats_) problem_.row_stats = stats.get();
    if (has_dlse_) problem_.dlse = dlse.get();
    problem_.dlse_batch_stride = problem_.heads * problem_.rows, problem_.dlse_head_stride = problem_.rows;
    problem_.dlse_row_stride = 1;
    const DeviceMemory own_stats(rows * sizeof(RowStats)), parts(rows * sizeof(float));
    const DeviceMemory dsink(static_cast<std::size_t>(problem_.heads) * sizeof(float));
    if (has_sink_) {
      problem_.sink = {sinks.get(), DType::kFloat32, kSinkStride};
      problem_.dsink = {dsink.get(), DType::kFloat32, 1};
      if (has_stats_) pass_.stats = static_cast<RowStats*>(own_stats.get());
      pass_.sink_parts = static_cast<float*>(parts.get());
    }
    const auto fact_count = 2 * problem_.batch * problem_.heads * padded_rows_;
    const DeviceMemory facts(static_cast<std::size_t>(fact_count) * sizeof(RowFacts));
    const DeviceMemory flags(std::vector<RowFlags>(1));
    pass_.facts = static_cast<RowFacts*>(facts.get()), pass_.flags = static_cast<RowFlags*>(flags.get());
    const std::int64_t sum_count = problem_.batch * problem_.heads * padded_rows_ * pass_.sum_width;
    const DeviceMemory sums(std::vector<float>(static_cast<std::size_t>(sum_count), kNaN));
    if (clears_) pass_.query_sums = static_cast<float*>(sums.get());
    expect_success(launch_row_facts(problem_, pass_, nullptr));
    if (has_sink_) expect_success(launch_sink_gradients(problem_, pass_.sink_parts, nullptr));
    facts_ = to_host(pass_.facts, fact_count);
    if (pass_.stats != nullptr) own_stats_ = to_host(pass_.stats, static_cast<std::int64_t>(rows));
    if (has_sink_) dsinks_ = to_host(static_cast<const float*>(dsink.get()), problem_.heads);
    flags_ = to_host(pass_.flags, 1)[0];
    sums_ = to_host(static_cast<const float*>(sums.get()), sum_count);
  }

  void expect_right() const {
    RowFlags flags = {};
    for (std::int64_t h = 0; h < problem_.heads; ++h) {
      double dsink = 0, size = 0;
      for (std::int64_t b = 0; b < problem_.batch; ++b) {
        for (std::int64_t row = 0; row < padded_rows_; ++row) expect_row(b, h, row, &flags, &dsink, &size);
      }
      if (!has_sink_) continue;
      const float got = dsinks_[static_cast<std::size_t>(h)];
      if (std::isnan(dsink)) {
        EXPECT_TRUE(std::isnan(got)) << "head " << h;
      } else {
        EXPECT_NEAR(got, dsink, 1e-5 * size) << "head " << h;
      }
    }
    const auto cleared = std::count(sums_.begin(), sums_.end(), 0.0f);
    EXPECT_EQ(static_cast<std::size_t>(cleared), clears_ ? sums_.size() : 0);
    EXPECT_EQ(flags_.has_large_row, flags.has_large_row);
    EXPECT_EQ(flags_.has_unseen_row, flags.has_unseen_row);
  }

 private:
  static constexpr int kSinkStride = 3;

  float sink_of(std::int64_t h) const { return sinks_[static_cast<std::size_t>(h * kSinkStride)]; }

  void make_sinks(Rng& rng) {
    const float special[] = {-kInfinity, kInfinity, kNaN, 0, 30, -30, 80, -80, 200, 1e5f, -1e5f, 3e38f, -3e38f};
    sinks_.assign(static_cast<std::size_t>(problem_.heads * kSinkStride), kNaN);
    for (std::int64_t h = 0; h < problem_.heads; ++h) {
      sinks_[static_cast<std::size_t>(h * kSinkStride)] = rng() % 2 == 0 ? normal(rng) : special[rng() % 13];
    }
  }

  void make_rows(Rng& rng) {
    const std::int64_t count = problem_.batch * problem_.heads * problem_.rows;
    const auto elements = static_cast<std::size_t>(count * problem_.value_dim);
    out_.assign(elements, Element(kNaN)), dout_ = out_;
    const float highest[] = {0, -3, 50, 1e3f, -1e5f, 1e5f, 3e38f, -3e38f};
    for (std::int64_t index = 0; index < count; ++index) {
      const std::int64_t row = index % problem_.rows, h = index / problem_.rows % problem_.heads;
      const std::int64_t b = index / problem_.rows / problem_.heads;
      Row values;
      values.highest = rng() % 2 == 0 ? normal(rng) : highest[rng() % 8];
      values.log_sum = 5 * std::abs(normal(rng));
      values.lse = values.highest * pass_.natural + values.log_sum;
      values.dlse = has_dlse_ && rng() % 4 != 0 ? normal(rng) : 0;
      if (rng() % 10 == 0) {  // sees no key, and may hold anything
        values.highest = values.lse = -kInfinity, values.dlse = kNaN;
      } else {
        const std::int64_t first = ((b * problem_.rows + row) * problem_.heads + h) * problem_.value_dim;
        for (std::int64_t column = first; column < first + problem_.value_dim; ++column) {
          const auto at = static_cast<std::size_t>(column);
          out_[at] = Element(normal(rng)), dout_[at] = Element(normal(rng));
          values.delta += double{static_cast<float>(out_[at])} * static_cast<float>(dout_[at]);
        }
      }
      rows_.push_back(values);
      lse_.push_back(values.lse), dlse_.push_back(values.dlse);
      stats_.push_back({values.highest, values.log_sum});
    }
  }

  void expect_row(std::int64_t b, std::int64_t h, std::int64_t row, RowFlags* flags, double* dsink,
                  double* size) const {
    SCOPED_TRACE("batch " + std::to_string(b) + ", head " + std::to_string(h) + ", row " + std::to_string(row));
    const std::int64_t first = 2 * (b * problem_.heads + h) * padded_rows_ + row_fact(row, pass_.row_tile);
    const float fact = facts_[static_cast<std::size_t>(first)];
    const float delta_fact = facts_[static_cast<std::size_t>(first + pass_.row_tile)];
    const auto index = static_cast<std::size_t>((b * problem_.heads + h) * problem_.rows + row);
    if (row >= problem_.rows || rows_[index].lse == -kInfinity) {
      EXPECT_EQ(fact, kInfinity);
      EXPECT_EQ(delta_fact, 0);
      if (row < problem_.rows) flags->has_unseen_row = 1;
      return;
    }
    const Row& values = rows_[index];
    const float sink = has_sink_ ? sink_of(h) : -kInfinity;
    const double highest = has_stats_ ? values.highest * pass_.natural : values.lse;
    const double log_sum = has_stats_ ? values.log_sum : 0;
    const double distance = (sink == kInfinity ? kNaN : sink) - highest - log_sum;
    double growth = std::max(distance, 0.0) + std::log1p(std::exp(-std::abs(distance)));
    if (sink != -kInfinity) *dsink -= values.delta / (1 + std::exp(-distance)), *size += std::abs(values.delta) + 1;
    if (values.dlse != 0 && growth > kMostLogGrowth) growth = kMostLogGrowth;
    if (std::isnan(growth)) {
      EXPECT_TRUE(std::isnan(fact));
      return;
    }
    const double dlse = values.dlse == 0 ? 0 : values.dlse * std::exp(growth);
    EXPECT_NEAR(delta_fact, values.delta - dlse, 1e-4 * (problem_.value_dim + std::abs(dlse)));
    // As one number, which is what tells whether the row is large.
    const double lse_log2 = (values.lse + growth) * double{kLog2E};
    const bool is_large = std::bit_cast<std::uint32_t>(fact) == std::bit_cast<std::uint32_t>(-0.0f);
    if (is_large) {
      flags->has_large_row = 1;
      EXPECT_TRUE(has_stats_ && std::abs(lse_log2) >= 1023.9);
    } else if (std::abs(lse_log2) > std::numeric_limits<float>::max()) {
      EXPECT_EQ(fact, lse_log2 > 0 ? kInfinity : -kInfinity);
    } else {
      EXPECT_TRUE(!has_stats_ || std::abs(lse_log2) <= 1024.1);
      EXPECT_NEAR(fact, lse_log2, 1e-6 * (std::abs(lse_log2) + std::abs(values.lse) + growth) + 1e-5);
    }
    if (!has_sink_ || !has_stats_) return;
    const RowStats stats = own_stats_[index];
    EXPECT_EQ(stats.x, values.highest);
    if (distance > std::numeric_limits<float>::max() && values.dlse == 0) {
      EXPECT_EQ(stats.y, kInfinity);
    } else {
      EXPECT_NEAR(stats.y, values.log_sum + growth, 1e-6 * (values.log_sum + growth + std::abs(sink)) + 1e-5);
    }
  }

  BackwardProblem problem_;
  RowPass pass_;
  bool has_stats_ = false, has_dlse_ = false, has_sink_ = false, clears_ = false;
  std::int64_t padded_rows_ = 0;
  std::vector<Row> rows_;
  std::vector<Element> out_, dout_;
  std::vector<float> sinks_, lse_, dlse_, dsinks_, sums_;
  std::vector<RowStats> stats_, own_stats_;
  std::vector<RowFacts> facts_;
  RowFlags flags_ = {};
};

template <typename Element>
void expect_right_for_random_calls() {
  Rng rng(7);
  for (int round = 0; round < rounds(1000); ++round) {
    Call<Element> call(rng);
    SCOPED_TRACE("round " + std::to_string(round) + ": " + call.name());
    call.run();
    call.expect_right();
    if (testing::Test::HasFailure()) return;
  }
}

TEST(RowFacts, RandomCallsInBFloat16) { expect_right_for_random_calls<__nv_bfloat16>(); }
TEST(RowFacts, RandomCallsInFloat16) { expect_right_for_random_calls<__half>(); }

// More rows than a block has threads, in every type of a sink.
template <typename Result>
void expect_sums(DType dtype) {
  BackwardProblem problem;
  problem.batch = 3, problem.rows = 1700, problem.heads = 2;
  const std::int64_t rows = problem.batch * problem.rows;
  std::vector<float> parts(static_cast<std::size_t>(rows * problem.heads));
  std::vector<double> expected(2);
  Rng rng(5);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i] = normal(rng);
    expected[i / static_cast<std::size_t>(rows)] += parts[i];
  }
  const DeviceMemory memory(parts), dsink(2 * sizeof(Result));
  problem.dsink = {dsink.get(), dtype, 1};
  expect_success(launch_sink_gradients(problem, static_cast<const float*>(memory.get()), nullptr));
  const auto got = to_host(static_cast<const Result*>(dsink.get()), 2);
  const double epsilon = sizeof(Result) == 4 ? 1e-6 : dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
  for (std::size_t h = 0; h < 2; ++h) {
    EXPECT_NEAR(static_cast<float>(got[h]), expected[h], 1e-4 + epsilon * std::abs(expected[h])) << name_of(dtype);
  }
}

TEST(SinkGradients, ManyRows) {
  expect_sums<float>(DType::kFloat32);
  expect_sums<__nv_bfloat16>(DType::kBFloat16);
  expect_sums<__half>(DType::kFloat16);
}

}  // namespace
}  // namespace flash_dmattn::internal::cuda
