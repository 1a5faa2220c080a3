// Intervals of masks found on the device against the host's.
#include "cuda/plan/device_mask_intervals.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "flash_dmattn/executor.h"
#include "plan/mask_intervals.h"
#include "plan_testing.h"
#include "rounds.h"

namespace flash_dmattn::internal {
namespace {

using cuda::DeviceMemory;
using cuda::expect_success;
using cuda::Layout;
using cuda::Rng;
using cuda::Sizes;
using cuda::Tensor;
using cuda::to_host;
using cuda::uniform;

constexpr std::uint8_t kTrue[] = {1, 0x80, 0xff, 2};  // any nonzero byte

// A mask whose rows follow one another for every key, and as many keys as `broken` of which they do not.
Tensor<std::uint8_t> interval_mask(Rng& rng, const Sizes& sizes, Layout layout, int broken) {
  auto mask = cuda::make_tensor<std::uint8_t>(rng, sizes, {1, 1, 1, 1}, layout);
  for (auto& value : mask.host) value = static_cast<std::uint8_t>(rng());  // what lies between the entries
  const auto rows = static_cast<int>(sizes.rows);
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    for (std::int64_t h = 0; h < sizes.heads; ++h) {
      for (std::int64_t key = 0; key < sizes.keys; ++key) {
        const int begin = uniform(rng, 0, 3) == 0 ? 0 : uniform(rng, 0, rows);
        const int end = uniform(rng, 0, 3) == 0 ? rows : uniform(rng, 0, rows);
        for (int row = 0; row < rows; ++row) {
          mask.at(b, h, row, key) = begin <= row && row < end ? kTrue[rng() % 4] : 0;
        }
      }
    }
  }
  for (; broken > 0; --broken) {
    const auto any = [&](std::int64_t size) { return uniform(rng, 0, static_cast<int>(size) - 1); };
    auto& entry = mask.at(any(sizes.batch), any(sizes.heads), any(sizes.rows), any(sizes.keys));
    entry = entry == 0 ? 1 : 0;
  }
  mask.upload();
  return mask;
}

void expect_same_as_on_host(Rng& rng, const Sizes& sizes, int broken) {
  const auto layout = static_cast<Layout>(uniform(rng, 0, 3));
  Tensor<std::uint8_t> mask = interval_mask(rng, sizes, layout, broken);
  MaskIntervalsProblem p;
  p.batch = sizes.batch, p.heads = sizes.heads, p.rows = sizes.rows, p.keys = sizes.keys;
  p.is_causal = uniform(rng, 0, 1) == 1;
  p.strides[0] = mask.view.batch_stride, p.strides[1] = mask.view.head_stride;
  p.strides[2] = mask.view.row_stride, p.strides[3] = mask.view.key_stride;
  const auto count = static_cast<std::size_t>(p.batch * p.heads * p.keys);
  std::vector<std::int32_t> expected_begin(count), expected_end(count);
  MaskIntervalsProblem on_host = p;
  on_host.mask = mask.host.data() + mask.first;
  on_host.begin = expected_begin.data(), on_host.end = expected_end.data();
  const bool expected = find_intervals(on_host, default_executor());

  DeviceMemory begin(count * sizeof(std::int32_t)), end(count * sizeof(std::int32_t));
  DeviceMemory workspace(cuda::mask_intervals_bytes(p));
  p.mask = static_cast<const std::uint8_t*>(mask.view.data);
  p.begin = static_cast<std::int32_t*>(begin.get()), p.end = static_cast<std::int32_t*>(end.get());
  const int* inexact = nullptr;
  ASSERT_TRUE(cuda::mask_intervals_fit(p));
  expect_success(cuda::mask_intervals(p, workspace.get(), &inexact, nullptr));
  expect_success(cudaDeviceSynchronize());
  ASSERT_EQ(to_host(inexact, 1)[0] == 0, expected);
  if (!expected) return;  // the intervals mean nothing
  const auto found_begin = to_host(p.begin, static_cast<std::int64_t>(count));
  const auto found_end = to_host(p.end, static_cast<std::int64_t>(count));
  for (std::size_t key = 0; key < count; ++key) {
    const bool seen = expected_begin[key] < expected_end[key];
    ASSERT_EQ(found_begin[key] < found_end[key], seen) << "key " << key;
    if (!seen) continue;
    ASSERT_EQ(found_begin[key], expected_begin[key]) << "key " << key;
    ASSERT_EQ(found_end[key], expected_end[key]) << "key " << key;
  }
}

TEST(MaskIntervalsCuda, AreThoseOfTheHost) {
  Rng rng(1);
  for (int round = 0; round < rounds(400); ++round) {
    // Segments of rows, strips of keys and their ends.
    const Sizes sizes = {uniform(rng, 1, 2), uniform(rng, 1, 3), 1, uniform(rng, 1, 700), uniform(rng, 1, 600)};
    SCOPED_TRACE("round " + std::to_string(round) + " rows " + std::to_string(sizes.rows) + " keys " +
                 std::to_string(sizes.keys));
    expect_same_as_on_host(rng, sizes, round % 2 == 0 ? 0 : uniform(rng, 1, 3));
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(MaskIntervalsCuda, WithoutRowsOrKeys) {
  Rng rng(2);
  for (const Sizes& sizes : {Sizes{2, 2, 1, 0, 7}, {2, 2, 1, 7, 0}, {0, 2, 1, 7, 7}}) {
    expect_same_as_on_host(rng, sizes, 0);
    if (testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace flash_dmattn::internal
