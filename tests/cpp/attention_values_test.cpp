// Numbers that are not finite, large, or between two that a dtype has.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

#include "attention_testing.h"

namespace flash_dmattn {
namespace {

using testing::Call;
using testing::kKernelDTypes;
using testing::reference_of;
using testing::Tensor;

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

}  // namespace
}  // namespace flash_dmattn
