// Which tiles of keys the blocks of a backward take, and in which order, against a walk over all that there may be.
#include "cuda/attention/key_works.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "cuda/attention/key_works.cuh"
#include "cuda/launch_blocks.cuh"
#include "plan_testing.h"
#include "rounds.h"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kWarp = 32;

// works[place]; a warp for each place.
template <int kTileKeys>
__global__ void read_works(const __grid_constant__ BackwardParams params, std::int32_t* works) {
  const int work = key_work<kTileKeys>(params, static_cast<int>(blockIdx.x));
  if (threadIdx.x == 0) works[blockIdx.x] = work;
}

// A plan of which nothing but sizes of lists, and what tiles' units see, is there.
template <int kTileKeys>
class Launch {
 public:
  Launch(Rng& rng, int most_chunks, int most_tiles) {
    BackwardParams& p = params_;
    p.batch = uniform(rng, 1, 3), p.key_heads = uniform(rng, 1, 4), p.group = uniform(rng, 1, 3);
    p.heads = p.key_heads * p.group;
    p.splits = rng() % 2 == 0 ? 1 : p.group;
    p.keys = uniform(rng, 1, most_tiles * 128);
    p.plan.chunk_count = uniform(rng, 1, most_chunks);
    p.plan.tiles = (p.keys + 127) / 128 * 2;
    p.plan.capacity = std::min(p.plan.tiles, 2 * uniform(rng, 1, most_tiles)) * kPlanTileKeys;
    p.plan.per_batch = rng() % 2 == 0;
    p.plan.plan_heads = rng() % 2 == 0 ? 1 : p.splits == 1 ? p.key_heads : p.heads;
    p.plan.head_divisor = p.heads / p.plan.plan_heads;
    p.chunk_limit = p.plan.chunk_count;
    if (rng() % 3 == 0) {  // as launches of a deterministic backward
      p.first_chunk = uniform(rng, 0, p.plan.chunk_count - 1);
      p.chunk_limit = uniform(rng, p.first_chunk, p.plan.chunk_count);
      p.takes_ranges = rng() % 2 == 0;
    }
    const int own_plans = (p.plan.per_batch ? p.batch : 1) * p.plan.plan_heads;
    const int lists = uniform(rng, 0, 2);  // none, some, all
    chunks_.resize(static_cast<std::size_t>(own_plans * p.plan.chunk_count));
    for (ChunkKeys& chunk : chunks_) {
      if (lists == 2 || (lists == 1 && rng() % 2 == 0)) {
        chunk = {rng() % 3 == 0 ? 0 : uniform(rng, 0, p.plan.capacity), -1};
      } else {
        chunk.first = uniform(rng, 0, p.keys - 1) / kPlanTileKeys * kPlanTileKeys;
        chunk.count = uniform(rng, 0, p.keys - chunk.first);
      }
    }
    units_.resize(chunks_.size() * static_cast<std::size_t>(p.plan.tiles));
    for (std::uint16_t& units : units_) units = static_cast<std::uint16_t>(rng() & rng());
  }

  // In the order in which they are numbered, with the units that each visits.
  std::vector<std::pair<int, int>> expected() const {
    const BackwardParams& p = params_;
    std::vector<std::pair<int, int>> works;
    int number = 0;
    for (int batch = 0; batch < p.batch; ++batch) {
      for (int share = 0; share < p.key_heads * p.splits; ++share) {
        const int head = share * (p.group / p.splits);
        const auto plan =
            static_cast<std::size_t>((p.plan.per_batch ? batch : 0) * p.plan.plan_heads + head / p.plan.head_divisor);
        const ChunkKeys* chunks = &chunks_[plan * static_cast<std::size_t>(p.plan.chunk_count)];
        const auto units = [&](int chunk, int tile) {
          const auto row = plan * static_cast<std::size_t>(p.plan.chunk_count) + static_cast<std::size_t>(chunk);
          int any = 0;
          for (int part = 0; part < kTileKeys / kPlanTileKeys; ++part) {
            if (tile + part < 0 || tile + part >= p.plan.tiles) continue;
            any |= units_[row * static_cast<std::size_t>(p.plan.tiles) + static_cast<std::size_t>(tile + part)];
          }
          return std::popcount(static_cast<unsigned>(any));
        };
        const bool has_range =
            std::any_of(chunks, chunks + p.plan.chunk_count, [](const ChunkKeys& chunk) { return chunk.first >= 0; });
        for (int tile = 0; p.takes_ranges && tile * kTileKeys < p.keys; ++tile, ++number) {
          if (!has_range) continue;
          int visits = 0;
          for (int chunk = 0; chunk < p.plan.chunk_count; ++chunk) {
            if (chunks[chunk].first < 0) continue;
            visits += units(chunk, (tile * kTileKeys - chunks[chunk].first) / kPlanTileKeys);
          }
          works.emplace_back(number, visits);
        }
        for (int chunk = p.first_chunk; chunk < p.chunk_limit; ++chunk) {
          for (int tile = 0; tile < p.plan.capacity / kTileKeys; ++tile, ++number) {
            if (chunks[chunk].first >= 0 || tile * kTileKeys >= chunks[chunk].count) continue;
            works.emplace_back(number, units(chunk, tile * kTileKeys / kPlanTileKeys));
          }
        }
      }
    }
    return works;
  }

  void check(bool orders) {
    std::vector<std::pair<int, int>> works = expected();
    if (orders) {
      const auto last = works.end() - std::min<std::ptrdiff_t>(std::ssize(works), kMostOrderedBlocks);
      std::stable_sort(last, works.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
    }
    const DeviceMemory chunks(chunks_), units(units_);
    params_.plan.chunks = static_cast<const ChunkKeys*>(chunks.get());
    params_.plan.tile_units = params_.plan.tile_full = static_cast<const std::uint16_t*>(units.get());
    const std::int64_t entries =
        key_work_entries(params_.batch, params_.key_heads, params_.splits, params_.plan.chunk_count);
    const DeviceMemory starts(static_cast<std::size_t>(entries + 1) * sizeof(std::int32_t)),
        last(kMostOrderedBlocks * sizeof(std::int32_t)), taken(sizeof(std::int32_t));
    params_.works = {static_cast<std::int32_t*>(starts.get()),
                     orders ? static_cast<std::int32_t*>(last.get()) : nullptr,
                     static_cast<std::int32_t*>(taken.get())};
    expect_success(list_key_works(params_, kTileKeys, nullptr));
    const std::int64_t places = std::ssize(works) + 2;
    const DeviceMemory read(static_cast<std::size_t>(places) * sizeof(std::int32_t));
    auto* numbers = static_cast<std::int32_t*>(read.get());
    expect_success(launch_blocks(read_works<kTileKeys>, {places, kWarp}, nullptr, params_, numbers));
    std::vector<std::int32_t> wanted;
    for (const auto& [number, visits] : works) wanted.push_back(number);
    wanted.insert(wanted.end(), 2, -1);
    EXPECT_EQ(to_host(numbers, places), wanted);
    EXPECT_EQ(to_host(params_.works.taken, 1)[0], 0);
  }

 private:
  BackwardParams params_;
  std::vector<ChunkKeys> chunks_;
  std::vector<std::uint16_t> units_;
};

template <int kTileKeys>
void check_rounds(int seed) {
  Rng rng(static_cast<unsigned>(seed));
  for (int round = 0; round < rounds(1000); ++round) {
    SCOPED_TRACE(round);
    Launch<kTileKeys>(rng, 4, 8).check(round % 2 == 0);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(KeyWorks, TilesOf64Keys) { check_rounds<64>(1); }
TEST(KeyWorks, TilesOf128Keys) { check_rounds<128>(2); }

// More entries than the kernel has threads, and more works than are put in order.
TEST(KeyWorks, ManyChunks) {
  Rng rng(3);
  for (int round = 0; round < rounds(40); ++round) Launch<64>(rng, 400, 12).check(round % 2 == 0);
}

}  // namespace
}  // namespace flash_dmattn::internal::cuda
