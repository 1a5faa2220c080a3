// Kept keys on the device against the host's, which are tested against selections: the same in every place.
#include "cuda/selection/append_kept_keys.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "flash_dmattn/executor.h"
#include "plan_testing.h"
#include "rounds.h"
#include "selection/append_kept_keys.h"

namespace flash_dmattn::internal {
namespace {

using cuda::DeviceMemory;
using cuda::expect_success;
using cuda::Rng;
using cuda::to_host;
using cuda::uniform;

struct State {
  std::vector<std::int32_t> indices, positions, lists, lengths;
  std::vector<std::uint8_t> scores, new_scores, cache_scores;
};

// Few distinct scores, so that there are ties, and the highest and lowest of all bits: NaN, infinities, lowest values.
void fill_scores(Rng& rng, DType dtype, std::vector<std::uint8_t>* bytes) {
  const std::size_t size = size_of(dtype);
  for (std::size_t at = 0; at < bytes->size(); at += size) {
    std::uint64_t bits = rng() % 3 == 0 ? std::uint64_t{rng()} << 32 | rng() : 0;
    if (rng() % 3 == 0) {
      // The top 16 bits of special values, with all or none of the lower ones set.
      const std::uint64_t top[] = {0x7f80, 0xff80, 0x7c00, 0xfc00, 0x7ff0, 0xfff0, 0xff7f, 0xfbff, 0x8000, 0xffff};
      bits = top[rng() % 10] << (8 * size - 16) | (rng() % 2 == 0 && size > 2 ? (1ull << (8 * size - 16)) - 1 : 0);
    } else if (rng() % 2 == 0) {
      bits = std::uint64_t{rng() % 4} << (8 * size - 8);
    }
    std::memcpy(bytes->data() + at, &bits, size);
  }
}

void expect_same_as_on_host(Rng& rng, std::int64_t window) {
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};
  KeptKeysProblem p;
  p.batch = uniform(rng, 1, 2), p.heads = uniform(rng, 1, 3), p.window = window, p.dtype = dtypes[rng() % 4];
  const std::size_t size = size_of(p.dtype);
  const auto places = static_cast<std::size_t>(p.batch * p.heads * window);
  State state;
  state.indices.assign(places, -1);
  if (window > 0 && rng() % 2 == 0) {  // some are there, also such as append_kept_keys never keeps
    for (std::size_t i = 0; i < places; ++i) {
      if (rng() % 3 != 0) state.indices[i] = static_cast<std::int32_t>(i % static_cast<std::size_t>(window));
    }
  }
  state.scores.resize(places * size);
  fill_scores(rng, p.dtype, &state.scores);  // an empty place is empty whatever its score is
  const std::int64_t first = uniform(rng, 0, 3) == 0 ? std::numeric_limits<std::int32_t>::max() - 20 : 0;
  // Lengths that are right and wrong, and the scores of a cache that both choose from.
  const bool has_lengths = rng() % 3 != 0;
  state.lengths.assign(static_cast<std::size_t>(p.batch * p.heads), 0);
  p.cache_keys = uniform(rng, 0, 700);
  const std::int64_t key_step = uniform(rng, 1, 2), head_stride = p.cache_keys * key_step + uniform(rng, 0, 2);
  p.cache_score_strides[0] = p.heads * head_stride, p.cache_score_strides[1] = head_stride;
  p.cache_score_strides[2] = key_step;
  state.cache_scores.resize(static_cast<std::size_t>(p.batch * p.heads * head_stride) * size);
  fill_scores(rng, p.dtype, &state.cache_scores);
  DeviceMemory indices(state.indices), scores(state.scores), cache_scores(state.cache_scores);
  for (std::int64_t done = 0; done < 40;) {
    p.new_keys = uniform(rng, 0, 16);
    const std::int64_t step = uniform(rng, 1, 2), row_stride = 16 * step + uniform(rng, 0, 2);
    p.new_score_strides[0] = p.heads * row_stride, p.new_score_strides[1] = row_stride, p.new_score_strides[2] = step;
    p.positions_stride = uniform(rng, 1, 2);
    state.new_scores.resize(static_cast<std::size_t>(p.batch * p.heads * row_stride) * size);
    fill_scores(rng, p.dtype, &state.new_scores);
    // Batch elements may be at different places, before the first key too.
    state.positions.resize(static_cast<std::size_t>(p.batch * p.positions_stride));
    for (auto& position : state.positions) {
      position = static_cast<std::int32_t>(first + done - (rng() % 5 == 0 ? 8 : 0));
    }
    const bool listed = rng() % 4 != 0, has_cache = has_lengths && rng() % 3 != 0;
    if (rng() % 3 == 0) {
      for (std::int32_t& length : state.lengths) length = static_cast<std::int32_t>(first + rng() % 40);
      for (std::int32_t& position : state.positions) position = static_cast<std::int32_t>(rng() % 800);
    }
    DeviceMemory lengths(state.lengths);
    state.lists.assign(places * static_cast<std::size_t>(p.new_keys), -7);
    DeviceMemory new_scores(state.new_scores), positions(state.positions), lists(state.lists);

    KeptKeysProblem on_host = p;
    on_host.indices = state.indices.data(), on_host.scores = state.scores.data();
    on_host.new_scores = state.new_scores.data(), on_host.positions = state.positions.data();
    on_host.lists = listed ? state.lists.data() : nullptr;
    on_host.lengths = has_lengths ? state.lengths.data() : nullptr;
    on_host.cache_scores = has_cache ? state.cache_scores.data() : nullptr;
    append_on_host(on_host, default_executor());

    p.indices = static_cast<std::int32_t*>(indices.get()), p.scores = scores.get();
    p.new_scores = new_scores.get(), p.positions = static_cast<const std::int32_t*>(positions.get());
    p.lists = listed ? static_cast<std::int32_t*>(lists.get()) : nullptr;
    p.lengths = has_lengths ? static_cast<std::int32_t*>(lengths.get()) : nullptr;
    p.cache_scores = has_cache ? cache_scores.get() : nullptr;
    expect_success(cuda::append_kept_keys(p, nullptr));
    expect_success(cudaDeviceSynchronize());
    ASSERT_EQ(to_host(static_cast<const std::int32_t*>(indices.get()), static_cast<std::int64_t>(places)),
              state.indices);
    ASSERT_EQ(to_host(static_cast<const std::uint8_t*>(scores.get()), static_cast<std::int64_t>(places * size)),
              state.scores);
    ASSERT_EQ(to_host(static_cast<const std::int32_t*>(lists.get()), static_cast<std::int64_t>(state.lists.size())),
              state.lists);
    ASSERT_EQ(to_host(static_cast<const std::int32_t*>(lengths.get()), static_cast<std::int64_t>(state.lengths.size())),
              state.lengths);
    done += p.new_keys;
  }
}

TEST(KeptKeysCuda, AreThoseOfTheHost) {
  Rng rng(1);
  for (int round = 0; round < rounds(600); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    expect_same_as_on_host(rng, round % 9 == 0 ? 0 : uniform(rng, 1, 30));
    if (testing::Test::HasFatalFailure()) return;
  }
}

// A thread looks after several places.
TEST(KeptKeysCuda, LargeWindows) {
  Rng rng(2);
  for (int round = 0; round < rounds(80); ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    expect_same_as_on_host(rng, uniform(rng, 31, 700));
    if (testing::Test::HasFatalFailure()) return;
  }
}

TEST(KeptKeysCuda, NothingToAppend) {
  KeptKeysProblem p;
  EXPECT_EQ(cuda::append_kept_keys(p, nullptr), cudaSuccess);
  p.batch = 2, p.heads = 0, p.window = 3, p.new_keys = 1;
  EXPECT_EQ(cuda::append_kept_keys(p, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace flash_dmattn::internal
