// Packed masks and plans of the device against the rules written out row by row and key by key.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "cuda/plan/make_plan.h"
#include "cuda/plan/pack_mask.h"
#include "expected_plan.h"
#include "plan_testing.h"
#include "rounds.h"

namespace flash_dmattn::internal::cuda {
namespace {

// The plan's chunk of (b, h) equals what it must be.
void expect_chunk(const DevicePlan& plan, const ExpectedChunk& expected, std::int64_t rows, std::int64_t b,
                  std::int64_t h, int chunk) {
  const std::int64_t entry = plan.first_chunk(b, h) + chunk;
  const ChunkKeys keys = to_host(plan.chunks + entry, 1)[0];
  ASSERT_EQ(keys.count, expected.keys.count);
  ASSERT_EQ(keys.first, expected.keys.first);
  ASSERT_EQ(to_host(plan.tile_units + entry * plan.tiles, plan.tiles), expected.tile_units);
  // Units without rows may be named or not.
  const std::int64_t units =
      std::min<std::int64_t>((rows - chunk * kChunkRows + kUnitRows - 1) / kUnitRows, kChunkUnits);
  auto full = to_host(plan.tile_full + entry * plan.tiles, plan.tiles);
  for (std::uint16_t& tile : full) tile &= static_cast<std::uint16_t>((1u << units) - 1);
  ASSERT_EQ(full, expected.tile_full);
  std::vector<std::int32_t> unit_tiles(static_cast<std::size_t>(units));
  for (std::size_t unit = 0; unit < unit_tiles.size(); ++unit) {
    for (std::uint16_t tile : expected.tile_units) unit_tiles[unit] += tile >> unit & 1;
  }
  ASSERT_EQ(to_host(plan.unit_tiles + entry * kChunkUnits, units), unit_tiles);
  if (keys.first >= 0) return;
  constexpr std::size_t kPair = 2 * kPlanTileKeys;
  std::vector<std::int32_t> list = expected.list;
  list.resize((list.size() + kPair - 1) / kPair * kPair, -1);
  ASSERT_LE(static_cast<std::int64_t>(list.size()), plan.capacity);
  ASSERT_EQ(to_host(plan.keys + entry * plan.capacity, static_cast<std::int64_t>(list.size())), list);
}

// Returns what count_plan counts.
PlanCounts expect_plan(Problem& problem) {
  problem.upload();
  const std::int64_t batch = problem.sizes.batch, heads = problem.sizes.heads;
  const PlanShape shape =
      plan_shape(problem.visibility, batch, heads, problem.list_limit, problem.order, problem.part_units);
  EXPECT_EQ(shape.capacity % (2 * kPlanTileKeys), 0);
  EXPECT_EQ(shape.tiles % 2, 0);
  EXPECT_GE(shape.tiles, shape.capacity / kPlanTileKeys);
  DeviceMemory memory(plan_bytes(shape, batch)), staging(staging_bytes(shape, batch));
  DeviceMemory device_counts(sizeof(PlanCounts));
  DevicePlan plan;
  expect_success(make_plan(problem.visibility, shape, batch, memory.get(), staging.get(), &plan, nullptr));
  auto* counts = static_cast<PlanCounts*>(device_counts.get());
  expect_success(count_plan(problem.visibility, plan, batch, heads, counts, nullptr));
  expect_success(cudaDeviceSynchronize());
  PlanCounts sums = {};
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t h = 0; h < heads; ++h) {
      for (int chunk = 0; chunk < plan.chunk_count; ++chunk) {
        SCOPED_TRACE("batch " + std::to_string(b) + " head " + std::to_string(h) + " chunk " + std::to_string(chunk));
        const ExpectedChunk expected = expected_chunk(problem, shape, b, h, chunk);
        expect_chunk(plan, expected, problem.sizes.rows, b, h, chunk);
        if (testing::Test::HasFatalFailure()) return {};
        sums.kept_scores += expected.kept;
        sums.computed_scores += expected.computed;
        sums.tiles_visited += expected.visited;
        sums.tiles_full += expected.full;
        sums.tiles_partial += expected.visited - expected.full;
        (expected.keys.first >= 0 ? sums.range_chunks : sums.list_chunks) += 1;
        for (const std::int32_t key : expected.list) sums.listed_keys += key >= 0;
      }
    }
  }
  const PlanCounts counted = to_host(counts, 1)[0];
  EXPECT_EQ(counted.kept_scores, sums.kept_scores);
  EXPECT_EQ(counted.computed_scores, sums.computed_scores);
  EXPECT_EQ(counted.tiles_visited, sums.tiles_visited);
  EXPECT_EQ(counted.tiles_partial, sums.tiles_partial);
  EXPECT_EQ(counted.tiles_full, sums.tiles_full);
  EXPECT_EQ(counted.listed_keys, sums.listed_keys);
  EXPECT_EQ(counted.range_chunks, sums.range_chunks);
  EXPECT_EQ(counted.list_chunks, sums.list_chunks);
  return counted;
}

void expect_packed_mask(Rng& rng, const Sizes& sizes, std::array<int, 4> form, Layout layout, int percent) {
  SCOPED_TRACE("form " + std::to_string(form[0]) + std::to_string(form[1]) + std::to_string(form[2]) +
               std::to_string(form[3]) + " layout " + std::to_string(static_cast<int>(layout)) + " rows " +
               std::to_string(sizes.rows) + " keys " + std::to_string(sizes.keys));
  Tensor<std::uint8_t> mask = make_mask(rng, sizes, form, layout, percent);
  DeviceMemory memory(packed_mask_bytes(mask.view, sizes.rows, sizes.keys));
  PackedMask packed;
  expect_success(pack_mask(mask.view, sizes.rows, sizes.keys, memory.get(), &packed, nullptr));
  expect_success(cudaDeviceSynchronize());
  const BroadcastView distinct = without_copies(mask.view);
  const std::int64_t chunks = (sizes.rows + kChunkRows - 1) / kChunkRows;
  const std::int64_t entries = distinct.batches * distinct.heads * chunks * distinct.keys;
  const auto words = to_host(packed.words, entries * kChunkWords);
  const auto units = to_host(packed.units, entries);
  for (std::int64_t b = 0; b < sizes.batch; ++b) {
    for (std::int64_t h = 0; h < sizes.heads; ++h) {
      for (std::int64_t key = 0; key < sizes.keys; ++key) {
        for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
          const auto entry = static_cast<std::size_t>(packed.offset(b, h, chunk, key));
          unsigned seen = 0, hidden = 0;
          for (std::int64_t w = 0; w < kChunkWords; ++w) {
            std::uint32_t word = 0;
            for (std::int64_t r = 0; r < kWordRows; ++r) {
              const std::int64_t row = chunk * kChunkRows + w * kWordRows + r;
              if (row >= sizes.rows) break;
              const bool shown = mask.at(b, h, row, key) != 0;
              word |= unsigned{shown} << r;
              hidden |= unsigned{!shown} << (w * kWordRows / kUnitRows);
            }
            if (word != 0) seen |= 1u << (w * kWordRows / kUnitRows);
            const std::uint32_t* found =
                packed.words_at(packed.offset(b, h, 0, 0), chunk * kChunkRows + w * kWordRows, key);
            ASSERT_EQ(words[static_cast<std::size_t>(found - packed.words)], word)
                << "batch " << b << " head " << h << " key " << key << " word " << w << " of chunk " << chunk;
          }
          ASSERT_EQ(units[entry], seen | (~hidden & kAnyUnit) << kChunkUnits)
              << "batch " << b << " head " << h << " key " << key << " chunk " << chunk;
        }
      }
    }
  }
}

TEST(PackMask, WordsAndUnitsAreThoseOfTheMask) {
  Rng rng(1);
  const std::pair<int, int> sizes[] = {{1, 1},     {5, 3},      {64, 128},   {130, 513},  {1024, 512},
                                       {1025, 31}, {1500, 640}, {2049, 127}, {900, 1040}, {1100, 130}};
  for (const auto& [rows, keys] : sizes) {
    for (const Layout layout : {Layout::kContiguous, Layout::kPaddedRows, Layout::kTransposed, Layout::kAnyOrder}) {
      for (const int percent : {1, 60}) {
        const int batch_form = uniform(rng, 0, 2), heads_form = random_heads_form(rng);
        expect_packed_mask(rng, {2, 4, 2, rows, keys}, {batch_form, heads_form, 1, 1}, layout, percent);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(PackMask, EveryBroadcastForm) {
  Rng rng(2);
  for (int form = 0; form < 3 * 4 * 3 * 3; ++form) {
    const std::array<int, 4> forms = {form / 36, form / 9 % 4, form / 3 % 3, form % 3};
    expect_packed_mask(rng, {2, 4, 2, uniform(rng, 1, 1200), uniform(rng, 1, 300)}, forms, random_layout(rng), 30);
    if (HasFatalFailure()) return;
  }
}

TEST(PackMask, CopiesTakeNoMemory) {
  Rng rng(3);
  const Sizes sizes = {3, 4, 2, 1500, 700};
  const auto bytes = [&](std::array<int, 4> form) {
    return packed_mask_bytes(make_tensor<std::uint8_t>(rng, sizes, form, Layout::kContiguous).view, sizes.rows,
                             sizes.keys);
  };
  EXPECT_EQ(bytes({2, 2, 1, 1}), bytes({0, 0, 1, 1}));
  EXPECT_EQ(bytes({2, 3, 1, 2}), bytes({0, 3, 1, 0}));
  EXPECT_GE(bytes({1, 1, 1, 1}), 12 * (bytes({0, 0, 1, 1}) - 128));
}

TEST(PackMask, NoRowsOrKeys) {
  Rng rng(4);
  for (const auto& [rows, keys] : {std::pair{0, 5}, {5, 0}, {0, 0}}) {
    const Sizes sizes = {2, 2, 1, rows, keys};
    const auto mask = make_tensor<std::uint8_t>(rng, sizes, {1, 1, 1, 1}, Layout::kContiguous);
    EXPECT_EQ(packed_mask_bytes(mask.view, rows, keys), 0u);
    DeviceMemory memory(0);
    PackedMask packed;
    expect_success(pack_mask(mask.view, rows, keys, memory.get(), &packed, nullptr));
  }
  expect_success(cudaDeviceSynchronize());
}

// Few and small, so that it is quick under compute-sanitizer.
TEST(MakePlan, SmallProblems) {
  Rng rng(5);
  for (int i = 0; i < 40; ++i) {
    SCOPED_TRACE("problem " + std::to_string(i));
    Problem problem = random_problem(rng, 1200, 800);
    expect_plan(problem);
    if (HasFailure()) return;
  }
}

class RandomPlans : public testing::TestWithParam<unsigned> {};

TEST_P(RandomPlans, AreThoseOfTheRules) {
  for (unsigned seed = GetParam(); seed < GetParam() + 10; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Rng rng(seed);
    Problem problem = random_problem(rng, 2500, 3500);
    expect_plan(problem);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(MakePlan, RandomPlans, testing::Range(100u, 100u + 10 * rounds(10), 10u));

class ManyKeys : public testing::TestWithParam<int> {};

// More keys than one round of the search takes, lists that fit shared memory and lists that do not.
TEST_P(ManyKeys, ArePlanned) {
  const int list_limit = GetParam();
  Rng rng(6);
  for (const Intervals kind : {Intervals::kTop, Intervals::kRandom, Intervals::kWindow}) {
    SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)));
    Problem problem;
    problem.sizes = {1, 1, 1, 1300, 70123};
    problem.causal = kind != Intervals::kRandom;
    problem.list_limit = list_limit;
    make_intervals(rng, problem, kind, {0, 0, 0, 1}, Layout::kContiguous, list_limit == 9000 ? 7000 : 1500);
    if (kind == Intervals::kRandom) {
      problem.key_mask = make_mask(rng, problem.sizes, {0, 0, 0, 1}, Layout::kAnyOrder, 10);
    }
    expect_plan(problem);
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(MakePlan, ManyKeys, testing::Values(0, 3000, 9000));

// Blocks of 128 rows that see the same keys, each others: together nearly all, and yet a list, of which units visit
// little more than the tiles that their keys fill.
TEST(MakePlan, RowsThatChooseAlikeVisitFewTiles) {
  constexpr std::int64_t kBlockRows = 128, kSeen = 2048;
  struct Case {
    std::int64_t keys;
    int part_units;
    double most_visits;
  };
  for (const Case& each : {Case{5000, 8, 1.15}, {16000, 16, 1.5}, {16000, 8, 1.1}, {16000, 4, 1.05}}) {
    const std::int64_t keys = each.keys;
    Rng rng(10);
    Problem problem;
    problem.sizes = {1, 1, 1, 2 * kChunkRows, keys};
    problem.order = ListOrder::kUnits;
    problem.part_units = each.part_units;
    problem.list_limit = keys;
    problem.mask = make_mask(rng, problem.sizes, {0, 0, 1, 1}, Layout::kContiguous, 0);
    std::vector<std::int64_t> order(static_cast<std::size_t>(keys));
    std::iota(order.begin(), order.end(), std::int64_t{0});
    for (std::int64_t row = 0; row < problem.sizes.rows; ++row) {
      if (row % kBlockRows == 0) std::shuffle(order.begin(), order.end(), rng);
      for (std::size_t i = 0; i < kSeen; ++i) problem.mask.at(0, 0, row, order[i]) = 1;
    }
    problem.mask.upload();
    const PlanCounts counts = expect_plan(problem);
    if (HasFailure()) return;
    EXPECT_EQ(counts.list_chunks, 2);
    const std::int64_t filled = problem.sizes.rows / kUnitRows * kSeen / kPlanTileKeys;
    EXPECT_LT(static_cast<double>(counts.tiles_visited), each.most_visits * static_cast<double>(filled));
  }
}

TEST(MakePlan, NothingToPlan) {
  for (const Sizes& sizes : {Sizes{0, 2, 1, 10, 10}, {2, 0, 0, 10, 10}, {2, 2, 1, 0, 10}, {2, 2, 1, 10, 0}}) {
    Rng rng(7);
    Problem problem;
    problem.sizes = sizes;
    problem.causal = true;
    expect_plan(problem);
    Problem masked;
    masked.sizes = sizes;
    masked.key_mask = make_mask(rng, sizes, {1, 1, 0, 1}, Layout::kContiguous, 50);
    expect_plan(masked);
  }
}

TEST(MakePlan, HeadsAndBatchElementsShareWhatIsTheSame) {
  Rng rng(8);
  const auto shape_of = [&](std::array<int, 4> form, bool seqlens) {
    Problem problem;
    problem.sizes = {3, 8, 2, 100, 200};
    problem.key_mask = make_mask(rng, problem.sizes, form, Layout::kContiguous, 50);
    if (seqlens) problem.seqlens = {1, 2, 3};
    problem.upload();
    return plan_shape(problem.visibility, 3, 8, 0);
  };
  EXPECT_EQ(shape_of({0, 0, 0, 1}, false).plan_heads, 1);
  EXPECT_EQ(shape_of({0, 2, 0, 1}, false).plan_heads, 1);
  EXPECT_EQ(shape_of({0, 3, 0, 1}, false).plan_heads, 2);
  EXPECT_EQ(shape_of({0, 3, 0, 1}, false).head_divisor, 4);
  EXPECT_EQ(shape_of({0, 1, 0, 1}, false).plan_heads, 8);
  EXPECT_FALSE(shape_of({2, 1, 0, 1}, false).per_batch);
  EXPECT_TRUE(shape_of({1, 1, 0, 1}, false).per_batch);
  EXPECT_TRUE(shape_of({0, 1, 0, 1}, true).per_batch);
}

// Without anything that hides single keys there are no lists, and no memory for them.
TEST(MakePlan, CausalProblemsAreRanges) {
  Problem problem;
  problem.sizes = {2, 4, 2, 3000, 5000};
  problem.causal = true;
  expect_plan(problem);
  const PlanShape shape = plan_shape(problem.visibility, 2, 4, 0);
  EXPECT_EQ(shape.capacity, 0);
  EXPECT_EQ(shape.plan_heads, 1);
}

// Packing and planning are captured, and give the same bits in every replay.
TEST(MakePlan, GraphsCaptureIt) {
  Rng rng(9);
  Problem problem;
  problem.sizes = {1, 2, 1, 3000, 3000};
  problem.causal = true;
  make_intervals(rng, problem, Intervals::kTop, {0, 1, 0, 1}, Layout::kContiguous, 500);
  problem.mask = make_mask(rng, problem.sizes, {0, 0, 1, 1}, Layout::kContiguous, 20);
  problem.upload();
  const PlanShape shape = plan_shape(problem.visibility, 1, 2, 0);
  const std::size_t bytes = plan_bytes(shape, 1), packed_bytes = packed_mask_bytes(problem.mask.view, 3000, 3000);
  DeviceMemory memory(bytes), staging(staging_bytes(shape, 1)), packed_memory(packed_bytes), counts(sizeof(PlanCounts));
  cudaStream_t stream;
  expect_success(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  DevicePlan plan;
  Visibility visibility = problem.visibility;
  expect_success(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  expect_success(pack_mask(problem.mask.view, 3000, 3000, packed_memory.get(), &visibility.packed, stream));
  expect_success(make_plan(visibility, shape, 1, memory.get(), staging.get(), &plan, stream));
  expect_success(count_plan(visibility, plan, 1, 2, static_cast<PlanCounts*>(counts.get()), stream));
  expect_success(cudaStreamEndCapture(stream, &graph));
  expect_success(cudaGraphInstantiate(&executable, graph, 0));
  std::vector<std::uint8_t> first;
  for (int replay = 0; replay < 4; ++replay) {
    expect_success(cudaMemsetAsync(memory.get(), 0x5a, bytes, stream));
    expect_success(cudaMemsetAsync(packed_memory.get(), 0x5a, packed_bytes, stream));
    expect_success(cudaGraphLaunch(executable, stream));
    expect_success(cudaStreamSynchronize(stream));
    const auto result = to_host(static_cast<const std::uint8_t*>(memory.get()), static_cast<std::int64_t>(bytes));
    if (replay == 0) first = result;
    EXPECT_EQ(result, first);
  }
  for (int h = 0; h < 2; ++h) {
    for (int chunk = 0; chunk < plan.chunk_count; ++chunk) {
      expect_chunk(plan, expected_chunk(problem, shape, 0, h, chunk), problem.sizes.rows, 0, h, chunk);
    }
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace flash_dmattn::internal::cuda
