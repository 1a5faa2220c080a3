// Plans and bitmaps against the rules written out key by key.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "cpu/decode_schedule.h"
#include "cpu/schedule.h"
#include "plan/bits.h"
#include "plan/chunk_plan.h"

namespace flash_dmattn::internal {
namespace {

using Rng = std::mt19937;

std::vector<std::uint8_t> random_bools(Rng& rng, std::size_t count, int percent) {
  std::vector<std::uint8_t> bools(count);
  // Any nonzero byte counts as true.
  for (auto& value : bools) value = rng() % 100 < static_cast<unsigned>(percent) ? (rng() % 2 ? 1 : 0x80) : 0;
  return bools;
}

bool bit(const std::vector<std::uint64_t>& words, std::int64_t position) {
  return (words[static_cast<std::size_t>(position / 64)] >> (position % 64)) & 1;
}

TEST(Bits, PacksBoolsOfAnyStrideAndCount) {
  Rng rng(1);
  for (const int stride : {1, 3}) {
    for (const int count : {0, 1, 7, 63, 64, 65, 200}) {
      const auto bools = random_bools(rng, static_cast<std::size_t>(count * stride + 1), 40);
      std::vector<std::uint64_t> words(static_cast<std::size_t>(words_for(count)), ~std::uint64_t{0});
      pack_bools(bools.data(), stride, count, words.data());
      for (int i = 0; i < static_cast<int>(words.size()) * 64; ++i) {
        EXPECT_EQ(bit(words, i), i < count && bools[static_cast<std::size_t>(i * stride)] != 0) << i;
      }
    }
  }
}

TEST(Bits, CompactsAndListsWhatIsKept) {
  Rng rng(2);
  for (const int percent : {0, 3, 50, 97, 100}) {
    constexpr int kCount = 500;
    const auto keep = random_bools(rng, kCount, percent), values = random_bools(rng, kCount, 50);
    std::vector<std::uint64_t> keep_words(words_for(kCount)), words(words_for(kCount));
    pack_bools(keep.data(), 1, kCount, keep_words.data());
    pack_bools(values.data(), 1, kCount, words.data());
    std::vector<std::int32_t> expected, listed(kCount);
    for (int i = 0; i < kCount; ++i) {
      if (keep[static_cast<std::size_t>(i)] != 0) expected.push_back(1000 + i);
    }
    listed.resize(static_cast<std::size_t>(list_bits(keep_words.data(), words_for(kCount), 1000, listed.data())));
    EXPECT_EQ(listed, expected);
    compact_bits(keep_words.data(), words_for(kCount), words.data());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(bit(words, static_cast<std::int64_t>(i)), values[static_cast<std::size_t>(expected[i] - 1000)] != 0);
    }
    // Bits behind the kept ones, in the last word that holds any, are clear.
    for (std::int64_t i = static_cast<std::int64_t>(expected.size()); i % 64 != 0; ++i) EXPECT_FALSE(bit(words, i));
  }
}

// What row i sees of key j, from docs/semantics.md.
bool sees(const AttentionProblem& problem, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) {
  const std::int64_t n = problem.key_count(b);
  if (j >= n || (problem.visibility.is_causal && j > i + n - problem.rows)) return false;
  if (problem.visibility.intervals.defined()) {
    const auto* begin = static_cast<const std::int32_t*>(problem.visibility.intervals.begin.data);
    const auto* end = static_cast<const std::int32_t*>(problem.visibility.intervals.end.data);
    if (i < begin[j] || i >= end[j]) return false;
  }
  const IndexViews& indices = problem.visibility.indices;
  if (indices.defined()) {
    const auto* list = static_cast<const std::int32_t*>(indices.entries.data) + i * indices.entries.row_stride;
    std::int64_t count = indices.entries.keys;
    if (indices.lengths.defined()) count = static_cast<const std::int32_t*>(indices.lengths.data)[i];
    bool is_listed = false;
    for (std::int64_t e = 0; e < std::min(count, indices.entries.keys); ++e) {
      const std::int64_t first = list[e * indices.entries.key_stride] * indices.block_size;
      is_listed = is_listed || (first >= 0 && first <= j && j < first + indices.block_size);
    }
    if (!is_listed) return false;
  }
  if (!problem.visibility.mask.defined()) return true;
  const auto* mask =
      static_cast<const std::uint8_t*>(problem.visibility.mask.data) + problem.visibility.mask.offset(b, h);
  return mask[i * problem.visibility.mask.row_stride + j * problem.visibility.mask.key_stride] != 0;
}

// `span`: the keys that were planned.
void expect_plan_is_right(const AttentionProblem& problem, const ChunkPlan& plan, std::int64_t b, std::int64_t h,
                          KeySpan span) {
  std::vector<int> listed(static_cast<std::size_t>(problem.keys), -1);
  for (int i = 0; i < plan.key_count; ++i) {
    ASSERT_EQ(listed[static_cast<std::size_t>(plan.key(i))], -1) << "listed twice";
    listed[static_cast<std::size_t>(plan.key(i))] = i;
  }
  std::int64_t kept = 0;
  std::vector<bool> seen(static_cast<std::size_t>(plan.key_count));
  for (int row = 0; row < plan.rows; ++row) {
    for (std::int64_t key = 0; key < problem.keys; ++key) {
      const int at = listed[static_cast<std::size_t>(key)];
      const bool planned = at >= 0 && ((plan.visible(row, at / 64) >> (at % 64)) & 1);
      const bool in_span = key >= span.begin && key < span.end;
      ASSERT_EQ(planned, in_span && sees(problem, b, h, plan.row_begin + row, key)) << "row " << row << " key " << key;
      if (planned) seen[static_cast<std::size_t>(at)] = true;
      kept += planned;
    }
  }
  for (int i = 0; i < plan.key_count; ++i)
    EXPECT_TRUE(seen[static_cast<std::size_t>(i)]) << "nobody sees listed key " << i;
  EXPECT_EQ(count_visible(plan), kept);
  for (int tile = 0; tile < plan.row_tiles() * plan.key_tiles(); ++tile) {
    const int row_tile = tile / plan.key_tiles(), key_tile = tile % plan.key_tiles();
    std::uint64_t any = 0, all = ~std::uint64_t{0};
    for (int row = row_tile * plan.row_tile; row < std::min((row_tile + 1) * plan.row_tile, plan.rows); ++row) {
      any |= plan.visible(row, key_tile);
      all &= plan.visible(row, key_tile);
    }
    const TileClass expected = any == 0 ? TileClass::kEmpty : ~all == 0 ? TileClass::kFull : TileClass::kPartial;
    EXPECT_EQ(plan.tile_class(row_tile, key_tile), expected);
  }
}

// Lists of random keys, or blocks of keys, for every row: in no order, some twice, some that do not exist.
struct RandomLists {
  static constexpr int kEntries = 40, kStride = 2;
  std::vector<std::int32_t> entries, lengths;

  RandomLists(Rng& rng, int rows, int keys, int percent, bool is_shared, int block_size, AttentionProblem* problem) {
    const int lists = is_shared ? 1 : rows;
    // Of few keys only, so that rows have many in common.
    const int blocks = std::max(keys * percent / 100, 1) / block_size + 1;
    entries.resize(static_cast<std::size_t>(lists * kEntries * kStride));
    for (auto& entry : entries) entry = static_cast<std::int32_t>(rng() % static_cast<unsigned>(blocks + 2)) - 1;
    entries[0] = std::numeric_limits<std::int32_t>::max();
    entries[kStride] = std::numeric_limits<std::int32_t>::min();
    for (int row = 0; row < lists; ++row) lengths.push_back(static_cast<std::int32_t>(rng() % (kEntries + 20)) - 10);
    IndexViews& views = problem->visibility.indices;
    views.entries.data = entries.data();
    views.entries.rows = lists;
    views.entries.keys = kEntries;
    views.entries.row_stride = is_shared ? 0 : kEntries * kStride;
    views.entries.key_stride = kStride;
    views.block_size = block_size;
    if (is_shared) return;
    views.lengths.data = lengths.data();
    views.lengths.rows = lists;
    views.lengths.row_stride = 1;
  }
};

// The last rows' plans of spans of keys, of any length, and of any beginning but where lists are packed.
void expect_spans_are_right(const AttentionProblem& problem, int rows) {
  constexpr int kRowTile = 16, kSpan = 100;
  std::vector<std::uint64_t> scratch(ChunkPlanner::span_scratch_bytes(problem, rows, kRowTile, kSpan) / 8);
  std::vector<std::uint64_t> list_memory(IndexRows::bytes(problem) / 8, ~std::uint64_t{0});
  const IndexRows lists(problem, list_memory.data());
  for (std::int64_t i = 0; i < lists.size(); ++i) lists.build(i);
  ChunkPlanner planner(problem, lists, rows, kRowTile, kSpan, scratch.data());
  for (KeySpan span : {KeySpan{0, 1}, {1, 101}, {63, 64}, {64, 128}, {65, 140}, {200, 300}, {450, 520}, {7, 7}}) {
    if (problem.visibility.indices.defined()) span.begin = span.begin / 64 * 64;
    const KeySpan existing = {std::min(span.begin, problem.keys), std::min(span.end, problem.keys)};
    const ChunkPlan& plan = planner.plan(0, 0, problem.rows - rows, rows, existing);
    expect_plan_is_right(problem, plan, 0, 0, existing);
  }
}

enum class MaskForm {
  kNone,
  kPerKey,
  kPerRow,
  kFull,
  kStrided,
  kWindow,
  kIntervals,
  kIntervalsAndMask,
  kLists,
  kBlockLists,
  kSharedList,
  kListsAndMask,
  kSharedListAndMaskPerKey,
  kSharedListAndMaskPerRow,
  kListsAndIntervals,
};

bool has_intervals(MaskForm form) {
  return form == MaskForm::kIntervals || form == MaskForm::kIntervalsAndMask || form == MaskForm::kListsAndIntervals;
}
bool has_mask(MaskForm form) {
  return form != MaskForm::kNone && form != MaskForm::kIntervals && form != MaskForm::kLists &&
         form != MaskForm::kBlockLists && form != MaskForm::kSharedList && form != MaskForm::kListsAndIntervals;
}

class ChunkPlans : public ::testing::TestWithParam<std::tuple<MaskForm, bool, int>> {};

TEST_P(ChunkPlans, ListExactlyWhatTheRulesShow) {
  const auto [form, causal, percent] = GetParam();
  Rng rng(3);
  for (const auto& [rows, keys, seqlen] : std::vector<std::array<int, 3>>{
           {100, 100, 100}, {33, 300, 257}, {200, 70, 70}, {1, 129, 5}, {64, 64, 0}, {130, 520, 520}}) {
    AttentionProblem problem;
    problem.batch = 1;
    problem.rows = rows;
    problem.keys = keys;
    problem.heads = problem.key_heads = 1;
    problem.visibility.is_causal = causal;
    const std::int32_t seqlens = seqlen;
    problem.visibility.seqlens = &seqlens;
    const int key_stride = form == MaskForm::kStrided ? 2 : 1;
    auto bools = random_bools(rng, static_cast<std::size_t>(rows * keys * key_stride), percent);
    if (form == MaskForm::kWindow) {
      for (int i = 0; i < rows; ++i) {
        for (int j = 0; j < keys; ++j) bools[static_cast<std::size_t>(i * keys + j)] = j > i - 20 && j < i + 20;
      }
    }
    std::vector<std::int32_t> begins, ends;
    if (has_intervals(form)) {
      for (int key = 0; key < keys; ++key) {
        // Some begin before the first row, some end behind the last, some are empty.
        begins.push_back(static_cast<std::int32_t>(rng() % static_cast<unsigned>(rows + 20)) - 10);
        ends.push_back(begins.back() - 5 +
                       static_cast<std::int32_t>(rng() % static_cast<unsigned>(rows + 20)) * percent / 100);
      }
      problem.visibility.intervals.begin.data = begins.data();
      problem.visibility.intervals.end.data = ends.data();
      problem.visibility.intervals.begin.dtype = problem.visibility.intervals.end.dtype = DType::kInt32;
      problem.visibility.intervals.begin.keys = problem.visibility.intervals.end.keys = keys;
      problem.visibility.intervals.begin.key_stride = problem.visibility.intervals.end.key_stride = 1;
    }
    if (has_mask(form)) {
      const bool by_row = form == MaskForm::kPerRow || form == MaskForm::kSharedListAndMaskPerRow;
      const bool by_key = form == MaskForm::kPerKey || form == MaskForm::kSharedListAndMaskPerKey;
      problem.visibility.mask.data = bools.data();
      problem.visibility.mask.row_stride = by_key ? 0 : by_row ? 1 : keys * key_stride;
      problem.visibility.mask.key_stride = by_row ? 0 : key_stride;
    }
    std::optional<RandomLists> lists;
    if (form >= MaskForm::kLists) {
      const bool is_shared = form == MaskForm::kSharedList || form == MaskForm::kSharedListAndMaskPerKey ||
                             form == MaskForm::kSharedListAndMaskPerRow;
      lists.emplace(rng, rows, keys, percent, is_shared, form == MaskForm::kBlockLists ? 7 : 1, &problem);
    }
    constexpr int kChunkRows = 96, kRowTile = 32;
    std::vector<std::uint64_t> scratch(ChunkPlanner::scratch_bytes(problem, kChunkRows, kRowTile) / 8);
    std::vector<std::uint64_t> index_memory(IntervalIndices::bytes(problem) / 8);
    const IntervalIndices indices(problem, index_memory.data());
    for (std::int64_t i = 0; i < indices.size(); ++i) indices.build(i);
    ChunkPlanner planner(problem, indices, kChunkRows, kRowTile, scratch.data());
    for (int first = 0; first < rows; first += kChunkRows) {
      const ChunkPlan& plan = planner.plan(0, 0, first, std::min(kChunkRows, rows - first));
      if (form == MaskForm::kNone || form == MaskForm::kWindow) {
        EXPECT_EQ(plan.keys, nullptr) << "a range needs no list";
      }
      expect_plan_is_right(problem, plan, 0, 0, {0, keys});
    }
    expect_spans_are_right(problem, std::min(rows, 16));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Forms, ChunkPlans,
    ::testing::Combine(::testing::Values(MaskForm::kNone, MaskForm::kPerKey, MaskForm::kPerRow, MaskForm::kFull,
                                         MaskForm::kStrided, MaskForm::kWindow, MaskForm::kIntervals,
                                         MaskForm::kIntervalsAndMask, MaskForm::kLists, MaskForm::kBlockLists,
                                         MaskForm::kSharedList, MaskForm::kListsAndMask,
                                         MaskForm::kSharedListAndMaskPerKey, MaskForm::kSharedListAndMaskPerRow,
                                         MaskForm::kListsAndIntervals),
                       ::testing::Bool(), ::testing::Values(2, 50, 98)));

// What the order of listed keys is for: a row tile's keys lie together, so that few scores are computed in vain.
TEST(IntervalPlans, PutWhatARowTileSeesTogether) {
  constexpr int kRows = 4096, kWindow = 512;
  AttentionProblem problem;
  problem.batch = problem.heads = problem.key_heads = 1;
  problem.rows = problem.keys = kRows;
  problem.visibility.is_causal = true;
  // Scores that grow with the position: every key is seen by the kWindow rows from its own on, in random order of
  // leaving.
  Rng rng(5);
  std::vector<std::int32_t> begins, ends;
  for (int key = 0; key < kRows; ++key) {
    begins.push_back(key);
    ends.push_back(std::min(kRows, key + 1 + static_cast<int>(rng() % (2 * kWindow))));
  }
  problem.visibility.intervals.begin.data = begins.data();
  problem.visibility.intervals.end.data = ends.data();
  problem.visibility.intervals.begin.dtype = problem.visibility.intervals.end.dtype = DType::kInt32;
  problem.visibility.intervals.begin.keys = problem.visibility.intervals.end.keys = kRows;
  problem.visibility.intervals.begin.key_stride = problem.visibility.intervals.end.key_stride = 1;
  std::vector<std::uint64_t> index_memory(IntervalIndices::bytes(problem) / 8);
  const IntervalIndices indices(problem, index_memory.data());
  indices.build(0);
  constexpr int kChunkRows = 256, kRowTile = 32;
  std::vector<std::uint64_t> scratch(ChunkPlanner::scratch_bytes(problem, kChunkRows, kRowTile) / 8);
  ChunkPlanner planner(problem, indices, kChunkRows, kRowTile, scratch.data());
  double kept = 0, computed = 0;
  for (int first = 0; first < kRows; first += kChunkRows) {
    const ChunkPlan& plan = planner.plan(0, 0, first, kChunkRows);
    kept += static_cast<double>(count_visible(plan));
    for (int tile = 0; tile < plan.row_tiles() * plan.key_tiles(); ++tile) {
      computed += plan.classes[tile] == TileClass::kEmpty ? 0 : kRowTile * kTileKeys;
    }
  }
  EXPECT_LT(computed / kept, 1.28);  // in order of the index it is 1.34
}

TEST(Schedules, CoverEveryRowOfEveryHeadOnce) {
  for (const int rows : {1, 31, 100, 5000}) {
    for (const int heads : {1, 6}) {
      AttentionProblem problem;
      problem.batch = 2;
      problem.rows = problem.keys = rows;
      problem.heads = heads;
      problem.key_heads = heads == 6 ? 3 : 1;
      const auto schedule = cpu::make_forward_schedule(problem, 4);
      std::vector<int> covered(static_cast<std::size_t>(2 * problem.key_heads * rows));
      for (std::int64_t i = 0; i < schedule.units; ++i) {
        const auto unit = schedule.unit(problem, i);
        for (std::int64_t head = unit.key_head_begin; head < unit.key_head_end; ++head) {
          for (std::int64_t row = unit.row_begin; row < unit.row_begin + unit.rows; ++row) {
            covered[static_cast<std::size_t>((unit.batch * problem.key_heads + head) * rows + row)] += 1;
          }
        }
      }
      for (const int times : covered) ASSERT_EQ(times, 1);
    }
  }
}

TEST(Schedules, DecodeUnitsCoverEveryKeyOfEveryHeadOnce) {
  for (const std::int64_t keys : {0, 1, 64, 1025, 5000, 70001}) {
    for (const std::int64_t key_heads : {1, 3, 8, 11, 40}) {
      for (const bool heads_alternate : {false, true}) {
        AttentionProblem problem;
        problem.batch = 2;
        problem.rows = 3;
        problem.keys = keys;
        problem.heads = 2 * key_heads;
        problem.key_heads = key_heads;
        problem.head_dim = 8;
        problem.key.token_stride = heads_alternate ? key_heads * 8 : 8;
        problem.key.head_stride = heads_alternate ? 8 : keys * 8;
        const auto schedule = cpu::make_decode_schedule(problem);
        std::vector<int> covered(static_cast<std::size_t>(2 * key_heads * keys));
        for (std::int64_t i = 0; i < schedule.units; ++i) {
          const auto unit = schedule.unit(problem, i);
          for (std::int64_t head = unit.key_head_begin; head < unit.key_head_end; ++head) {
            for (std::int64_t key = unit.keys.begin; key < unit.keys.end; ++key) {
              covered[static_cast<std::size_t>((unit.batch * key_heads + head) * keys + key)] += 1;
            }
          }
        }
        for (const int times : covered) ASSERT_EQ(times, 1);
        EXPECT_GE(schedule.units, 2) << "without keys rows are written all the same";
      }
    }
  }
}

TEST(Schedules, BackwardSplitsCoverEveryChunkOnce) {
  for (const int chunks : {1, 2, 7, 16, 33}) {
    for (const int splits : {1, 2, 5, 8}) {
      cpu::BackwardSchedule schedule;
      schedule.chunks = chunks;
      schedule.splits = splits;
      std::vector<int> covered(static_cast<std::size_t>(chunks));
      for (int split = 0; split < splits; ++split) {
        for (std::int64_t step = 0;; ++step) {
          const std::int64_t chunk = schedule.chunk(split, step);
          if (chunk < 0) break;
          covered[static_cast<std::size_t>(chunk)] += 1;
        }
      }
      for (const int times : covered) EXPECT_EQ(times, 1);
    }
  }
}

// Deterministic calls must be cut up alike for any number of workers.
TEST(Schedules, DeterministicCallsIgnoreTheNumberOfWorkers) {
  BackwardProblem problem;
  problem.batch = 1;
  problem.rows = problem.keys = 3000;
  problem.heads = problem.key_heads = 2;
  problem.head_dim = 64;
  problem.deterministic = true;
  const auto few = cpu::make_backward_schedule(problem, 1), many = cpu::make_backward_schedule(problem, 64);
  EXPECT_EQ(few.chunk_rows, many.chunk_rows);
  EXPECT_EQ(few.splits, many.splits);
  EXPECT_EQ(cpu::make_forward_schedule(problem, 1).chunk_rows, cpu::make_forward_schedule(problem, 64).chunk_rows);
}

}  // namespace
}  // namespace flash_dmattn::internal
