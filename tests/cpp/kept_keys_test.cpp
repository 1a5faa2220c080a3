// append_kept_keys against select_keys on the whole history, after every new key.
#include "flash_dmattn/kept_keys.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "attention_testing.h"
#include "core/thread_pool.h"
#include "flash_dmattn/selection.h"

namespace flash_dmattn {
namespace {

using testing::lowest_of;
using testing::Tensor;

constexpr std::int64_t kBatch = 2, kHeads = 3;

// Few distinct scores, so that there are ties everywhere, and all special values.
Tensor random_scores(DType dtype, std::int64_t keys, std::mt19937& rng) {
  const double special[] = {std::nan(""), HUGE_VAL, -HUGE_VAL, lowest_of(dtype), 0.0, -0.0};
  Tensor scores(dtype, {kBatch, kHeads, keys});
  scores.fill(
      [&] { return rng() % 5 == 0 ? special[rng() % 6] : static_cast<double>(static_cast<int>(rng() % 9) - 4) / 2; });
  return scores;
}

// Keys [begin, end) of the last dimension.
TensorView slice(const Tensor& scores, std::int64_t begin, std::int64_t end) {
  TensorView view = scores.view();
  view.data = static_cast<std::byte*>(view.data) + static_cast<std::size_t>(begin) * size_of(view.dtype);
  view.shape[2] = end - begin;
  return view;
}

using Keys = std::vector<std::set<std::int64_t>>;  // of each (batch, head)

// What select_keys keeps of the first `keys` scores for the last row.
Keys selected(const Tensor& scores, std::int64_t keys, std::int64_t window) {
  Tensor begin(DType::kInt32, {kBatch, kHeads, keys}), end = begin;
  EXPECT_TRUE(select_keys({slice(scores, 0, keys)}, {window, keys, true}, {begin.view(), end.view()}).ok());
  Keys found(static_cast<std::size_t>(kBatch * kHeads));
  for (std::size_t i = 0; i < begin.count(); ++i) {
    if (begin.get(i) < static_cast<double>(keys) && end.get(i) == static_cast<double>(keys)) {
      found[i / static_cast<std::size_t>(keys)].insert(static_cast<std::int64_t>(i) % keys);
    }
  }
  return found;
}

struct State {
  State(DType dtype, std::int64_t window)
      : indices(DType::kInt32, {kBatch, kHeads, window}), scores(dtype, {kBatch, kHeads, window}) {
    indices.fill([] { return -1.0; });
    // An empty place is empty whatever its score is.
    scores.fill([] { return std::nan(""); });
  }
  KeptKeys kept() const { return {indices.view(), scores.view()}; }

  Tensor indices, scores;
};

// The indices of one list, no index twice.
std::set<std::int64_t> keys_in(const Tensor& lists, std::int64_t list, std::int64_t window) {
  std::set<std::int64_t> found;
  for (std::int64_t place = 0; place < window; ++place) {
    const auto index = static_cast<std::int64_t>(lists.get(static_cast<std::size_t>(list * window + place)));
    if (index >= 0) {
      EXPECT_TRUE(found.insert(index).second) << index << " is there twice";
    }
  }
  return found;
}

TEST(KeptKeys, AreThoseThatASelectionFromAllKeysKeeps) {
  std::mt19937 rng(1);
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};
  for (int round = 0; round < 400; ++round) {
    const DType dtype = dtypes[round % 4];
    const std::int64_t window = round % 7 == 0 ? 0 : round % 11 == 0 ? 100 : 1 + static_cast<std::int64_t>(rng() % 12);
    constexpr std::int64_t kKeys = 60;
    const Tensor scores = random_scores(dtype, kKeys, rng);
    State state(dtype, window);
    internal::ThreadPool pool(1 + round % 3);
    for (std::int64_t done = 0; done < kKeys;) {
      const std::int64_t rows = std::min<std::int64_t>(static_cast<std::int64_t>(rng() % 17), kKeys - done);
      Tensor positions(DType::kInt32, {kBatch}), lists(DType::kInt32, {kBatch, kHeads, rows, window});
      positions.fill([&] { return static_cast<double>(done); });
      const bool listed = rng() % 4 != 0;
      const Status status = append_kept_keys({slice(scores, done, done + rows), positions.view()}, state.kept(),
                                             listed ? lists.view() : TensorView{}, {&pool});
      ASSERT_TRUE(status.ok()) << status.message();
      for (std::int64_t row = 0; row < rows; ++row) {
        const Keys expected = selected(scores, done + row + 1, window);
        for (std::int64_t head = 0; head < kBatch * kHeads; ++head) {
          const auto& keys = expected[static_cast<std::size_t>(head)];
          if (row == rows - 1) {
            ASSERT_EQ(keys_in(state.indices, head, window), keys) << round;
          }
          if (listed) {
            ASSERT_EQ(keys_in(lists, head * rows + row, window), keys) << round;
          }
        }
      }
      done += rows;
    }
    for (std::size_t i = 0; i < state.indices.count(); ++i) {
      if (state.indices.get(i) < 0) continue;
      const std::size_t head = i / static_cast<std::size_t>(window);
      const double score = scores.get(head * kKeys + static_cast<std::size_t>(state.indices.get(i)));
      const double held = state.scores.get(i);
      ASSERT_TRUE(held == score || (std::isnan(held) && std::isnan(score)));
    }
  }
}

// The cache is not the one that the lengths tell of: keys were taken off its end and replaced, or added by somebody
// else.
TEST(KeptKeys, AreChosenAnewWhereTheCacheIsAnother) {
  std::mt19937 rng(3);
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};
  constexpr std::int64_t kKeys = 60;
  for (int round = 0; round < 300; ++round) {
    const DType dtype = dtypes[round % 4];
    const std::int64_t window = round % 9 == 0 ? 100 : static_cast<std::int64_t>(rng() % 12);
    Tensor scores = random_scores(dtype, kKeys, rng);
    State state(dtype, window);
    Tensor lengths(DType::kInt32, {kBatch, kHeads});
    lengths.fill([] { return -1.0; });
    KeptKeys kept = state.kept();
    kept.lengths = lengths.view();
    internal::ThreadPool pool(1 + round % 3);
    std::int64_t length = 0;
    for (int step = 0; step < 12; ++step) {
      const auto rows = static_cast<std::int64_t>(rng() % 5);
      const bool continues = step > 0 && rng() % 2 == 0 && length + rows <= kKeys;
      if (!continues) {
        length = static_cast<std::int64_t>(rng() % (kKeys - 5));
        const Tensor others = random_scores(dtype, kKeys, rng);
        for (std::size_t i = 0; i < scores.count(); ++i) {
          if (static_cast<std::int64_t>(i) % kKeys >= length) scores.set(i, others.get(i));
        }
        lengths.fill([&] { return static_cast<double>(length) + (rng() % 2 == 0 ? 1.0 : -1.0); });
      }
      Tensor positions(DType::kInt32, {kBatch}), lists(DType::kInt32, {kBatch, kHeads, rows, window});
      positions.fill([&] { return static_cast<double>(length); });
      NewKeys new_keys = {slice(scores, length, length + rows), positions.view()};
      // Scores of new and of later keys may be there or not.
      const std::int64_t known = rng() % 2 == 0 ? kKeys : length;
      if (!continues || rng() % 2 == 0) new_keys.cache_scores = slice(scores, 0, known);
      const Status status = append_kept_keys(new_keys, kept, lists.view(), {&pool});
      ASSERT_TRUE(status.ok()) << status.message();
      for (std::int64_t head = 0; head < kBatch * kHeads; ++head) {
        ASSERT_EQ(lengths.get(static_cast<std::size_t>(head)), static_cast<double>(length + rows));
        for (std::int64_t row = 0; row < rows; ++row) {
          const Keys expected = selected(scores, length + row + 1, window);
          ASSERT_EQ(keys_in(lists, head * rows + row, window), expected[static_cast<std::size_t>(head)]) << round;
        }
        const Keys expected = selected(scores, length + rows, window);
        ASSERT_EQ(keys_in(state.indices, head, window), expected[static_cast<std::size_t>(head)]) << round;
      }
      length += rows;
    }
  }
}

// Heads that continue are left alone.
TEST(KeptKeys, AreChosenAnewHeadByHead) {
  std::mt19937 rng(4);
  constexpr std::int64_t kKeys = 30, kWindow = 5;
  const Tensor scores = random_scores(DType::kFloat32, kKeys, rng);
  State state(DType::kFloat32, kWindow);
  state.indices.fill([] { return 7.0; });
  Tensor lengths(DType::kInt32, {kBatch, kHeads}), positions(DType::kInt32, {kBatch});
  positions.fill([] { return 20.0; });
  for (std::size_t head = 0; head < lengths.count(); ++head) lengths.set(head, head % 2 == 0 ? 20 : 19);
  KeptKeys kept = state.kept();
  kept.lengths = lengths.view();
  ASSERT_TRUE(append_kept_keys({slice(scores, 20, 20), positions.view(), scores.view()}, kept).ok());
  const Keys expected = selected(scores, 20, kWindow);
  for (std::size_t head = 0; head < lengths.count(); ++head) {
    EXPECT_EQ(lengths.get(head), 20);
    if (head % 2 == 0) {
      EXPECT_EQ(state.indices.get(head * kWindow), 7);
    } else {
      EXPECT_EQ(keys_in(state.indices, static_cast<std::int64_t>(head), kWindow), expected[head]);
    }
  }
  // Before the first key, and at the end of what an index can be.
  for (const auto& [position, length] : {std::pair{-3.0, 0.0}, {2147483647.0, 2147483647.0}}) {
    positions.fill([position = position] { return position; });
    ASSERT_TRUE(append_kept_keys({slice(scores, 0, 2), positions.view(), scores.view()}, kept).ok());
    for (std::size_t head = 0; head < lengths.count(); ++head) EXPECT_EQ(lengths.get(head), length);
  }
}

TEST(KeptKeys, StartFromASelectionAndFromDifferentPositions) {
  std::mt19937 rng(2);
  constexpr std::int64_t kKeys = 40, kWindow = 6;
  const Tensor scores = random_scores(DType::kFloat32, kKeys + 5, rng);
  State state(DType::kFloat32, kWindow);
  // Batch element b has b keys that are not among its scores here: keys are named by their positions alone.
  Tensor positions(DType::kInt32, {kBatch});
  for (std::int64_t done = 0; done < kKeys; done += 5) {
    positions.set(0, static_cast<double>(done));
    positions.set(1, static_cast<double>(done + 1000));
    ASSERT_TRUE(append_kept_keys({slice(scores, done, done + 5), positions.view()}, state.kept()).ok());
  }
  Keys expected = selected(scores, kKeys, kWindow);
  for (std::int64_t head = 0; head < kBatch * kHeads; ++head) {
    std::set<std::int64_t> shifted;
    for (const std::int64_t key : expected[static_cast<std::size_t>(head)]) {
      shifted.insert(key + (head >= kHeads ? 1000 : 0));
    }
    EXPECT_EQ(keys_in(state.indices, head, kWindow), shifted);
  }
}

TEST(KeptKeys, ANewKeyTakesTheFirstEmptyPlaceOrThatOfTheKeyItPutsOut) {
  const std::int64_t window = 3;
  State state(DType::kFloat32, window);
  Tensor scores(DType::kFloat32, {kBatch, kHeads, 1}), positions(DType::kInt32, {kBatch});
  const auto append = [&](double score, std::int64_t position) {
    scores.fill([&] { return score; });
    positions.fill([&] { return static_cast<double>(position); });
    EXPECT_TRUE(append_kept_keys({scores.view(), positions.view()}, state.kept()).ok());
    return std::vector<double>{state.indices.get(0), state.indices.get(1), state.indices.get(2)};
  };
  EXPECT_EQ(append(2, 0), (std::vector<double>{0, -1, -1}));
  EXPECT_EQ(append(1, 1), (std::vector<double>{0, 1, -1}));
  EXPECT_EQ(append(1, 2), (std::vector<double>{0, 1, 2}));
  EXPECT_EQ(append(1, 3), (std::vector<double>{0, 3, 2}));  // among equals the oldest goes
  EXPECT_EQ(append(0, 4), (std::vector<double>{0, 3, 2}));
  EXPECT_EQ(append(std::nan(""), 5), (std::vector<double>{0, 3, 5}));
  EXPECT_EQ(append(9, -1), (std::vector<double>{0, 3, 5}));  // no key
  EXPECT_EQ(append(9, 2147483647), (std::vector<double>{0, 2147483647, 5}));
}

TEST(KeptKeys, RefuseBadArguments) {
  const State state(DType::kFloat32, 4);
  const Tensor scores(DType::kFloat32, {kBatch, kHeads, 2}), positions(DType::kInt32, {kBatch});
  const Tensor lists(DType::kInt32, {kBatch, kHeads, 2, 4});
  const NewKeys good{scores.view(), positions.view()};
  const auto argument_of = [](const NewKeys& new_keys, const KeptKeys& kept, const TensorView& its_lists) {
    return append_kept_keys(new_keys, kept, its_lists).argument();
  };
  EXPECT_EQ(argument_of(good, state.kept(), lists.view()), "");
  EXPECT_EQ(argument_of(good, {{}, state.scores.view()}, {}), "indices");
  EXPECT_EQ(argument_of(good, {state.scores.view(), state.scores.view()}, {}), "indices");
  EXPECT_EQ(argument_of(good, {state.indices.view(), {}}, {}), "scores");
  EXPECT_EQ(argument_of(good, {state.indices.view(), state.indices.view()}, {}), "scores");
  EXPECT_EQ(argument_of(good, {state.indices.view(), scores.view()}, {}), "scores");
  KeptKeys transposed = state.kept();
  std::swap(transposed.indices.strides[0], transposed.indices.strides[1]);
  EXPECT_EQ(argument_of(good, transposed, {}), "indices");
  EXPECT_EQ(argument_of({{}, positions.view()}, state.kept(), {}), "new_scores");
  EXPECT_EQ(argument_of({positions.view(), positions.view()}, state.kept(), {}), "new_scores");
  EXPECT_EQ(argument_of({Tensor(DType::kFloat16, {kBatch, kHeads, 2}).view(), positions.view()}, state.kept(), {}),
            "new_scores");
  EXPECT_EQ(argument_of({Tensor(DType::kFloat32, {kBatch, 1, 2}).view(), positions.view()}, state.kept(), {}),
            "new_scores");
  EXPECT_EQ(argument_of({Tensor(DType::kFloat32, {kBatch, kHeads, 17}).view(), positions.view()}, state.kept(), {}),
            "new_scores");
  EXPECT_EQ(argument_of({scores.view(), {}}, state.kept(), {}), "positions");
  EXPECT_EQ(argument_of({scores.view(), Tensor(DType::kInt32, {kHeads}).view()}, state.kept(), {}), "positions");
  EXPECT_EQ(argument_of(good, state.kept(), state.indices.view()), "lists");

  const Tensor lengths(DType::kInt32, {kBatch, kHeads}), cache(DType::kFloat32, {kBatch, kHeads, 9});
  const auto with_lengths = [&](const TensorView& its_lengths) {
    return KeptKeys{state.indices.view(), state.scores.view(), its_lengths};
  };
  const auto with_cache = [&](const TensorView& its_cache) {
    return NewKeys{scores.view(), positions.view(), its_cache};
  };
  EXPECT_EQ(argument_of(with_cache(cache.view()), with_lengths(lengths.view()), {}), "");
  EXPECT_EQ(argument_of(good, with_lengths(positions.view()), {}), "lengths");
  EXPECT_EQ(argument_of(good, with_lengths(scores.view()), {}), "lengths");
  EXPECT_EQ(argument_of(with_cache(cache.view()), state.kept(), {}), "cache_scores");
  EXPECT_EQ(argument_of(with_cache(lengths.view()), with_lengths(lengths.view()), {}), "cache_scores");
  EXPECT_EQ(argument_of(with_cache(lists.view()), with_lengths(lengths.view()), {}), "cache_scores");
  EXPECT_EQ(
      argument_of(with_cache(Tensor(DType::kFloat32, {kHeads, kHeads, 9}).view()), with_lengths(lengths.view()), {}),
      "cache_scores");
}

}  // namespace
}  // namespace flash_dmattn
