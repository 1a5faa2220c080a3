// How a backward without a plan deals its tiles of keys: that every step of every tile is in one work, and what the
// order saves, by a simulation of blocks that take works one after another.
#include "cuda/attention/key_tile_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <queue>
#include <vector>

#include "cuda/attention/key_works.cuh"
#include "cuda/attention/row_walk.cuh"
#include "cuda/launch_blocks.cuh"
#include "plan_testing.h"
#include "rounds.h"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kWarp = 32, kTileKeys = 128, kTileRows = 64;

// What a work is: its tile of keys as they are numbered, cut and segment. And how often each step of each tile, (tiles,
// heads of a share, tiles of rows), is met. A warp for each work.
struct WorkRecord {
  std::int32_t tile, cut, segment;
};
__global__ void read_works(const __grid_constant__ BackwardParams params, WorkRecord* works, std::int32_t* met) {
  using Walk = RowWalk<kTileRows, kTileKeys, false>;
  __shared__ Walk walk;
  const KeyBlock block = block_of_work<kTileKeys, false>(params, static_cast<int>(blockIdx.x));
  const int heads = params.group / params.splits, share = block.first_head / heads;
  const int tile =
      (block.batch * params.key_heads * params.splits + share) * range_tiles<kTileKeys>(params) + block.tile;
  const int row_tiles = (params.rows + kTileRows - 1) / kTileRows;
  walk.start(params, block, params.keys);
  for (auto step = walk.next(params, block, params.keys); step.exists(); step = walk.next(params, block, params.keys)) {
    const int index = (tile * heads + step.head - block.first_head) * row_tiles + step.row_tile;
    if (threadIdx.x == 0) atomicAdd(met + index, 1);
  }
  if (threadIdx.x == 0) works[blockIdx.x] = {tile, block.cut, block.segment};
}

TEST(KeyTileOrder, EveryStepIsInOneWork) {
  Rng rng(1);
  for (int round = 0; round < rounds(400); ++round) {
    SCOPED_TRACE(round);
    BackwardParams params;
    params.batch = uniform(rng, 1, 3), params.key_heads = uniform(rng, 1, 4), params.group = uniform(rng, 1, 3);
    params.heads = params.key_heads * params.group;
    params.rows = uniform(rng, 1, 700), params.keys = uniform(rng, 1, 900);
    params.visibility.rows = params.rows, params.visibility.keys = params.keys;
    params.visibility.is_causal = rng() % 2 == 0;
    const KeyTiles keys = {.heads = params.batch * params.key_heads,
                           .tiles = (params.keys + kTileKeys - 1) / kTileKeys,
                           .steps = std::int64_t{params.group} * ((params.rows + kTileRows - 1) / kTileRows),
                           .work_steps = 0.1 * uniform(rng, 0, 40),
                           .is_causal = params.visibility.is_causal};
    params.tile_order = order_key_tiles(keys, uniform(rng, 1, 100));
    const std::int64_t tiles = keys.heads * keys.tiles, cut = cut_tiles(keys, params.tile_order);
    const int works = unplanned_works<kTileKeys>(params, static_cast<int>(keys.heads));
    ASSERT_EQ(works, tiles + cut * (params.tile_order.segments - 1));

    const DeviceMemory records(static_cast<std::size_t>(works) * sizeof(WorkRecord)),
        met(std::vector<std::int32_t>(static_cast<std::size_t>(tiles * keys.steps)));
    auto* read = static_cast<WorkRecord*>(records.get());
    expect_success(
        launch_blocks(read_works, {works, kWarp}, nullptr, params, read, static_cast<std::int32_t*>(met.get())));

    const int row_tiles = (params.rows + kTileRows - 1) / kTileRows;
    const std::vector<std::int32_t> counts = to_host(static_cast<const std::int32_t*>(met.get()), tiles * keys.steps);
    for (std::size_t i = 0; i < counts.size(); ++i) {
      const int key_tile = static_cast<int>(i / static_cast<std::size_t>(keys.steps)) % static_cast<int>(keys.tiles);
      const int last_row = std::min((static_cast<int>(i) % row_tiles + 1) * kTileRows, params.rows) - 1;
      const bool sees = !params.visibility.is_causal || last_row + params.keys - params.rows >= key_tile * kTileKeys;
      ASSERT_EQ(counts[i], sees ? 1 : 0) << i;
    }

    std::vector<std::vector<int>> segments(static_cast<std::size_t>(tiles));  // that were met
    std::vector<int> cuts(static_cast<std::size_t>(cut), -1);                 // whose they are
    for (const WorkRecord& work : to_host(read, works)) {
      ASSERT_LT(work.cut, cut);
      ASSERT_TRUE(work.cut >= 0 || work.segment == 0);
      segments[static_cast<std::size_t>(work.tile)].push_back(work.cut < 0 ? -1 : work.segment);
      if (work.cut < 0) continue;
      int& owner = cuts[static_cast<std::size_t>(work.cut)];
      ASSERT_TRUE(owner < 0 || owner == work.tile);
      owner = work.tile;
    }
    for (std::vector<int>& met_segments : segments) {
      std::sort(met_segments.begin(), met_segments.end());
      std::vector<int> wanted = {-1};
      if (met_segments.size() != 1) {
        wanted.clear();
        for (int segment = 0; segment < params.tile_order.segments; ++segment) wanted.push_back(segment);
      }
      ASSERT_EQ(met_segments, wanted);
    }
  }
}

// When the last of `processors` blocks ends that take works one after another, in steps.
double time_of(const KeyTiles& keys, const KeyTileOrder& order, std::int64_t processors) {
  std::priority_queue<double, std::vector<double>, std::greater<>> free_at;
  for (std::int64_t i = 0; i < processors; ++i) free_at.push(0);
  const std::int64_t tiles = keys.heads * keys.tiles, cut = cut_tiles(keys, order);
  const std::int64_t first_woven = (keys.heads - order.woven_heads) * keys.tiles;
  double end = 0;
  for (std::int64_t place = 0; place < tiles; ++place) {
    const std::int64_t tile =
        place < first_woven ? place % keys.tiles : (place - first_woven) / std::max(order.woven_heads, 1);
    double steps = static_cast<double>(keys.steps);
    if (keys.is_causal) steps *= 1 - static_cast<double>(tile) / static_cast<double>(keys.tiles);
    const int parts = place >= tiles - cut ? order.segments : 1;
    for (int part = 0; part < parts; ++part) {
      const double time = free_at.top() + steps / parts + keys.work_steps;
      free_at.pop();
      free_at.push(time);
      end = std::max(end, time);
    }
  }
  return end;
}

// Of the time that dealing tiles as they are numbered takes, the order is to take at most `most`.
void expect_saves(const KeyTiles& keys, double most) {
  constexpr std::int64_t kProcessors = 132;
  const double before = time_of(keys, {}, kProcessors),
               after = time_of(keys, order_key_tiles(keys, kProcessors), kProcessors);
  EXPECT_LE(after, most * before) << before << " to " << after;
}

TEST(KeyTileOrder, LastTilesAreCut) {
  expect_saves({.heads = 16, .tiles = 128, .steps = 256, .work_steps = 3, .is_causal = false}, 0.98);
  expect_saves({.heads = 32, .tiles = 128, .steps = 128, .work_steps = 1.5, .is_causal = false}, 0.975);
  expect_saves({.heads = 8, .tiles = 64, .steps = 512, .work_steps = 3, .is_causal = false}, 1);
}
TEST(KeyTileOrder, LongestTilesStartFirst) {
  expect_saves({.heads = 128, .tiles = 16, .steps = 32, .work_steps = 3, .is_causal = true}, 0.96);
  expect_saves({.heads = 16, .tiles = 16, .steps = 32, .work_steps = 3, .is_causal = true}, 0.7);
}
TEST(KeyTileOrder, FewTilesAreAllCut) {
  expect_saves({.heads = 4, .tiles = 16, .steps = 32, .work_steps = 3, .is_causal = false}, 0.6);
  expect_saves({.heads = 4, .tiles = 16, .steps = 32, .work_steps = 3, .is_causal = true}, 0.5);
}
// Nor is anything done where it would not help: one step cannot be divided, and whole rounds are best as they are.
TEST(KeyTileOrder, OthersStayAsTheyAre) {
  EXPECT_EQ(order_key_tiles({.heads = 5, .tiles = 7, .steps = 1, .work_steps = 3, .is_causal = false}, 132).segments,
            1);
  EXPECT_EQ(order_key_tiles({.heads = 132, .tiles = 2, .steps = 99, .work_steps = 3, .is_causal = false}, 132).segments,
            1);
  EXPECT_EQ(order_key_tiles({.heads = 3, .tiles = 0, .steps = 0, .work_steps = 3, .is_causal = true}, 132).segments, 1);
}

}  // namespace
}  // namespace flash_dmattn::internal::cuda
