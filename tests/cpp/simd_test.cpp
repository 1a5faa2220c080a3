// The vector helpers of every instruction set that this CPU has, against the C library in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "flash_dmattn/info.h"
#include "simd_probe.h"

namespace flash_dmattn::internal::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct NamedProbe {
  const char* isa;  // as in CpuInfo
  const SimdProbe* probe;
};

class Simd : public ::testing::TestWithParam<NamedProbe> {
 protected:
  void SetUp() override {
    const auto supported = cpu_info().supported;
    if (std::find(supported.begin(), supported.end(), GetParam().isa) == supported.end()) {
      GTEST_SKIP() << "this CPU lacks " << GetParam().isa;
    }
  }

  const SimdProbe& probe() const { return *GetParam().probe; }

  // The function at x, checked to be the same in every lane.
  float at(void (*function)(const float*, float*), float x) const {
    std::vector<float> from(static_cast<std::size_t>(probe().lanes), x), to(from.size());
    function(from.data(), to.data());
    for (const float lane : to) EXPECT_EQ(std::memcmp(&lane, &to[0], sizeof lane), 0);
    return to[0];
  }
};

// Distance in units of the last place of the exact result.
double ulps(float got, double exact) {
  const auto rounded = static_cast<float>(std::fabs(exact));
  return std::fabs(static_cast<double>(got) - exact) /
         (static_cast<double>(std::nextafter(rounded, kInfinity)) - static_cast<double>(rounded));
}

TEST_P(Simd, ExponentialIsAccurateToTwoUlps) {
  double worst = 0, worst_short = 0;
  for (float x = -87.33f; x < 88.0f; x += 0.00173f) {
    const double exact = std::exp(static_cast<double>(x));
    worst = std::max(worst, ulps(at(probe().exponential6, x), exact));
    if (x <= 0) {
      worst_short = std::max(worst_short, std::fabs(static_cast<double>(at(probe().exponential5, x)) / exact - 1));
    }
  }
  for (float x = -1.0f; x < 1.0f; x += 0.000317f) {
    worst = std::max(worst, ulps(at(probe().exponential6, x), std::exp(static_cast<double>(x))));
  }
  EXPECT_LE(worst, 2.0);
  // The short form is only used with fused multiply-add.
  if (probe().fused_multiply_add) {
    EXPECT_LE(worst_short, 0x1p-20);
  }
}

TEST_P(Simd, ExponentialOfHiddenScoresIsZeroAndNaNStays) {
  for (const auto function : {probe().exponential6, probe().exponential5}) {
    for (const float x : {-kInfinity, -3.4e38f, -1e30f, -1000.0f, -104.0f, -88.0f})
      EXPECT_EQ(at(function, x), 0.0f) << x;
    EXPECT_EQ(at(function, 0.0f), 1.0f);
    EXPECT_EQ(at(function, -0.0f), 1.0f);
    EXPECT_TRUE(std::isnan(at(function, std::nanf(""))));
  }
}

TEST_P(Simd, HyperbolicTangentIsAccurate) {
  const auto function = probe().hyperbolic_tangent;
  for (float x = -12.0f; x < 12.0f; x += 0.000731f) {
    ASSERT_LE(ulps(at(function, x), std::tanh(static_cast<double>(x))), 3.0) << x;
  }
  EXPECT_EQ(at(function, kInfinity), 1.0f);
  EXPECT_EQ(at(function, -kInfinity), -1.0f);
  EXPECT_EQ(at(function, 1e30f), 1.0f);
  EXPECT_TRUE(std::isnan(at(function, std::nanf(""))));
}

// Every bfloat16 survives the way to float and back; what lies between two rounds to the nearest, ties to even.
TEST_P(Simd, Bfloat16RoundsToNearestEven) {
  const auto round = [&](std::uint32_t word) {
    float value = 0;
    std::memcpy(&value, &word, sizeof value);
    const std::vector<float> floats(static_cast<std::size_t>(probe().lanes), value);
    std::vector<std::uint16_t> halves(floats.size());
    probe().bf16_of(floats.data(), 1.0f, probe().lanes, halves.data());
    return halves.back();
  };
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    const std::uint32_t word = bits << 16, magnitude = bits & 0x7fff;
    if (magnitude > 0x7f80) {
      ASSERT_GT(round(word) & 0x7fff, 0x7f80) << "NaN";
      continue;
    }
    ASSERT_EQ(round(word), bits);
    if (magnitude == 0x7f80) continue;
    ASSERT_EQ(round(word | 0x8000), bits + (bits & 1)) << "half way to the next";
    ASSERT_EQ(round(word | 0x7fff), bits);
  }
  EXPECT_EQ(round(0x7f7fffff), 0x7f80) << "beyond the largest: infinity";
}

TEST_P(Simd, RowsOfAnyLengthAreConvertedWithoutTouchingMore) {
  for (int count = 0; count <= 3 * probe().lanes + 1; ++count) {
    std::vector<std::uint16_t> halves(static_cast<std::size_t>(count) + 1, 0x3c00);  // 1.0
    std::vector<float> floats(static_cast<std::size_t>(count) + 1, -7.0f);
    probe().floats_of_fp16(halves.data(), count, floats.data());
    EXPECT_EQ(floats.back(), -7.0f);
    floats.pop_back();
    for (const float value : floats) EXPECT_EQ(value, 1.0f);
    halves.back() = 0x1234;
    probe().fp16_of(floats.data(), 0.5f, count, halves.data());
    EXPECT_EQ(halves.back(), 0x1234);
    halves.pop_back();
    for (const std::uint16_t half : halves) EXPECT_EQ(half, 0x3800);  // 0.5
  }
}

TEST_P(Simd, MasksSelectTheLanesOfTheirBits) {
  const std::vector<float> ones(static_cast<std::size_t>(probe().lanes), 1.0f);
  for (const std::uint64_t bits : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{0xa5a5}, ~std::uint64_t{0}}) {
    std::vector<float> selected(ones.size());
    probe().select(bits, ones.data(), selected.data());
    for (std::size_t i = 0; i < selected.size(); ++i) EXPECT_EQ(selected[i], static_cast<float>((bits >> i) & 1));
  }
}

const NamedProbe kProbes[] = {
    {"baseline", &kBaselineProbe},
#if defined(__x86_64__)
    {"avx2", &kAvx2Probe},
    {"avx512", &kAvx512Probe},
#endif
};

INSTANTIATE_TEST_SUITE_P(Isa, Simd, ::testing::ValuesIn(kProbes),
                         [](const auto& info) { return std::string(info.param.isa); });

}  // namespace
}  // namespace flash_dmattn::internal::cpu
