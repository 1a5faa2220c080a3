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
#include "cuda/attention/row_walk.cuh"
#include "cuda/launch_blocks.cuh"
#include "plan_testing.h"
#include "rounds.h"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kNotMet = -2;  // rows that the tile of keys has nothing to do with

constexpr int kWrongBlock = -3;

// Of what comes at each place the number of the tile of keys, which is to be that of `wanted`, or what key_work says if
// there is none; a warp for each place.
template <int kTileKeys>
__global__ void read_works(const __grid_constant__ BackwardParams params, const std::int32_t* wanted,
                           std::int32_t* numbers) {
  int number = key_work<kTileKeys, true>(params, static_cast<int>(blockIdx.x), all_works<kTileKeys, true>(params));
  if (number >= 0) {
    const KeyBlock block = block_of_work<kTileKeys, true>(params, number);
    number = wanted[blockIdx.x];
    if (number < 0 || !(block == key_block<kTileKeys, true>(params, static_cast<unsigned>(number))))
      number = kWrongBlock;
  }
  if (threadIdx.x == 0) numbers[blockIdx.x] = number;
}

// previous[tile of keys][tile of rows]; a warp for each tile of keys.
template <int kTileRows, int kTileKeys>
__global__ void read_previous_tiles(const __grid_constant__ BackwardParams params, int apart, std::int32_t* previous) {
  using Walk = RowWalk<kTileRows, kTileKeys, true>;
  const KeyBlock block = key_block<kTileKeys, true>(params, blockIdx.x);
  const int chunk_tiles = kChunkRows / kTileRows;
  for (int row_tile = 0; row_tile < params.plan.chunk_count * chunk_tiles; ++row_tile) {
    const int chunk = row_tile / chunk_tiles;
    int tile = kNotMet;
    if (chunk >= block.first_chunk && chunk < block.end_chunk &&
        (block.listed || params.plan.chunks[block.plan_chunk + chunk - block.first_chunk].first >= 0)) {
      tile = max(Walk::previous_tile(params, block, row_tile, apart), -1);
    }
    if (threadIdx.x == 0) previous[blockIdx.x * params.plan.chunk_count * chunk_tiles + row_tile] = tile;
  }
}

// A plan of which nothing but sizes of lists, and what tiles' units see, is there.
template <int kTileKeys>
class Launch {
 public:
  Launch(Rng& rng, int most_chunks, int most_tiles) {
    BackwardParams& p = params_;
    p.batch = uniform(rng, 1, 5), p.key_heads = uniform(rng, 1, 5), p.group = uniform(rng, 1, 3);
    p.heads = p.key_heads * p.group;
    p.splits = rng() % 2 == 0 ? 1 : p.group;
    tracks_ = uniform(rng, 1, kMostKeyTracks);
    p.keys = uniform(rng, 1, most_tiles * 128);
    p.plan.chunk_count = uniform(rng, 1, most_chunks);
    p.plan.tiles = (p.keys + 127) / 128 * 2;
    p.plan.capacity = std::min(p.plan.tiles, 2 * uniform(rng, 1, most_tiles)) * kPlanTileKeys;
    p.plan.per_batch = rng() % 2 == 0;
    p.plan.plan_heads = rng() % 2 == 0 ? 1 : p.splits == 1 ? p.key_heads : p.heads;
    p.plan.head_divisor = p.heads / p.plan.plan_heads;
    p.chunk_limit = p.plan.chunk_count;
    p.processors = uniform(rng, 1, kMostOrderedBlocks);
    const int own_plans = (p.plan.per_batch ? p.batch : 1) * p.plan.plan_heads;
    const int lists = uniform(rng, 0, 3);  // none, some, all, all without a key
    chunks_.resize(static_cast<std::size_t>(own_plans * p.plan.chunk_count));
    for (ChunkKeys& chunk : chunks_) {
      if (lists >= 2 || (lists == 1 && rng() % 2 == 0)) {
        chunk = {lists == 3 || rng() % 3 == 0 ? 0 : uniform(rng, 0, p.plan.capacity), -1};
      } else {
        chunk.first = uniform(rng, 0, p.keys - 1) / kPlanTileKeys * kPlanTileKeys;
        chunk.count = uniform(rng, 0, p.keys - chunk.first);
      }
    }
    units_.resize(chunks_.size() * static_cast<std::size_t>(p.plan.tiles));
    const bool sparse = rng() % 2 == 0;  // then most tiles meet few rows
    for (std::uint16_t& units : units_) {
      units = static_cast<std::uint16_t>(rng() & rng() & (sparse ? rng() & rng() & rng() & rng() : ~0u));
    }
  }

  // In the order in which they are numbered, with the units that each visits. `starts`: where each key head's begin.
  std::vector<std::pair<int, int>> expected(std::vector<std::size_t>* starts) const {
    const BackwardParams& p = params_;
    std::vector<std::pair<int, int>> works;
    int number = 0;
    for (int batch = 0; batch < p.batch; ++batch) {
      for (int share = 0; share < p.key_heads * p.splits; ++share) {
        if (share % p.splits == 0) starts->push_back(works.size());
        const int head = share * (p.group / p.splits);
        const auto plan =
            static_cast<std::size_t>((p.plan.per_batch ? batch : 0) * p.plan.plan_heads + head / p.plan.head_divisor);
        const ChunkKeys* chunks = &chunks_[plan * static_cast<std::size_t>(p.plan.chunk_count)];
        const auto units = [&](int chunk, int tile) {
          const auto row = plan * static_cast<std::size_t>(p.plan.chunk_count) + static_cast<std::size_t>(chunk);
          int any = 0;
          for (int part = 0; part < std::max(1, kTileKeys / kPlanTileKeys); ++part) {
            if (tile + part < 0 || tile + part >= p.plan.tiles) continue;
            any |= units_[row * static_cast<std::size_t>(p.plan.tiles) + static_cast<std::size_t>(tile + part)];
          }
          return std::popcount(static_cast<unsigned>(any));
        };
        // Blocks of all keys also store the zeros of a head whose keys no row sees, if nothing is added to sums.
        const bool stores = std::none_of(chunks, chunks + p.plan.chunk_count,
                                         [](const ChunkKeys& chunk) { return chunk.first < 0 && chunk.count > 0; });
        const auto first_of_range = [&](int key) {  // that some range has, from `key` on
          int first = p.keys;
          for (int chunk = 0; chunk < p.plan.chunk_count; ++chunk) {
            const ChunkKeys& range = chunks[chunk];
            if (range.first >= 0 && range.first + range.count > key && range.count > 0) {
              first = std::min(first, std::max(key, range.first));
            }
          }
          return first;
        };
        for (int tile = 0; tile * kTileKeys < p.keys; ++tile, ++number) {
          // Tiles between those of ranges are works, too.
          const bool any_before = first_of_range(0) < (tile + 1) * kTileKeys,
                     any_after = first_of_range(tile * kTileKeys) < p.keys;
          if (!stores && !(any_before && any_after)) continue;
          int visits = 0;
          for (int chunk = 0; chunk < p.plan.chunk_count; ++chunk) {
            if (chunks[chunk].first < 0) continue;
            visits += units(chunk, tile * kTileKeys / kPlanTileKeys - chunks[chunk].first / kPlanTileKeys);
          }
          works.emplace_back(number, visits);
        }
        for (int chunk = 0; chunk < p.plan.chunk_count; ++chunk) {
          for (int tile = 0; tile < p.plan.capacity / kTileKeys; ++tile, ++number) {
            if (chunks[chunk].first >= 0 || tile * kTileKeys >= chunks[chunk].count) continue;
            works.emplace_back(number, units(chunk, tile * kTileKeys / kPlanTileKeys));
          }
        }
      }
    }
    return works;
  }

  // What read_previous_tiles is to find.
  template <int kTileRows>
  void check_previous_tiles(int apart) {
    const BackwardParams& p = params_;
    const DeviceMemory chunks(chunks_), units(units_);
    params_.plan.chunks = static_cast<const ChunkKeys*>(chunks.get());
    params_.plan.tile_units = params_.plan.tile_full = static_cast<const std::uint16_t*>(units.get());
    constexpr int kParts = kTileKeys / kPlanTileKeys, kChunkTiles = kChunkRows / kTileRows;
    const std::int64_t blocks = key_blocks<kTileKeys, true>(p);
    const int key_tiles = (p.keys + kTileKeys - 1) / kTileKeys, list_tiles = p.plan.capacity / kTileKeys;
    const int tiles = key_tiles + list_tiles * p.plan.chunk_count;
    std::vector<std::int32_t> wanted;
    for (int number = 0; number < blocks; ++number) {
      const int index = number % tiles, part = number / tiles;
      const int batch = part / (p.key_heads * p.splits), head = part % (p.key_heads * p.splits) * (p.group / p.splits);
      const auto plan =
          static_cast<std::size_t>((p.plan.per_batch ? batch : 0) * p.plan.plan_heads + head / p.plan.head_divisor);
      const bool listed = index >= key_tiles;
      const int tile = listed ? (index - key_tiles) % list_tiles : index;
      for (int row_tile = 0; row_tile < p.plan.chunk_count * kChunkTiles; ++row_tile) {
        const int chunk = row_tile / kChunkTiles;
        const std::size_t row = plan * static_cast<std::size_t>(p.plan.chunk_count) + static_cast<std::size_t>(chunk);
        const bool met = listed ? (index - key_tiles) / list_tiles == chunk : chunks_[row].first >= 0;
        const auto meets = [&](int other) {
          for (int unit = 0; unit < kTileRows / kUnitRows; ++unit) {
            for (int i = 0; i < kParts; ++i) {
              const int plan_tile = other * kParts + i - (listed ? 0 : chunks_[row].first / kPlanTileKeys);
              if (plan_tile < 0 || plan_tile >= p.plan.tiles) continue;
              const std::size_t entry =
                  row * static_cast<std::size_t>(p.plan.tiles) + static_cast<std::size_t>(plan_tile);
              if ((units_[entry] >> (row_tile % kChunkTiles * (kTileRows / kUnitRows) + unit) & 1) != 0) return true;
            }
          }
          return false;
        };
        int other = tile - apart;
        while (met && other >= 0 && !meets(other)) other -= apart;
        wanted.push_back(met ? std::max(other, -1) : kNotMet);
      }
    }
    const DeviceMemory read(wanted.size() * sizeof(std::int32_t));
    auto* previous = static_cast<std::int32_t*>(read.get());
    expect_success(
        launch_blocks(read_previous_tiles<kTileRows, kTileKeys>, {blocks, kWarp}, nullptr, params_, apart, previous));
    EXPECT_EQ(to_host(previous, std::ssize(wanted)), wanted);
  }

  enum class Order { kNumbers, kLongestFirst, kTurns };

  // What comes at each place, and at two more.
  std::vector<std::int32_t> expected(Order order) const {
    std::vector<std::size_t> starts;
    std::vector<std::pair<int, int>> works = expected(&starts);
    std::vector<std::int32_t> places;
    if (order == Order::kTurns) {
      // Tracks of neighbouring key heads take turns.
      const auto tracks = static_cast<std::size_t>(params_.turns.tracks);
      const auto start_of = [&](std::size_t track) {
        return track == tracks ? works.size() : starts[track * starts.size() / tracks];
      };
      for (std::size_t turn = 0, left = works.size(); left > 0; ++turn) {
        for (std::size_t track = 0; track < tracks; ++track) {
          const std::size_t work = start_of(track) + turn;
          const bool exists = work < start_of(track + 1);
          places.push_back(exists ? works[work].first : kNoWork);
          if (exists) --left;
        }
      }
    } else {
      if (order == Order::kLongestFirst) {
        const std::ptrdiff_t ordered = std::min(2 * params_.processors, kMostOrderedBlocks);
        const auto last = works.end() - std::min(std::ssize(works), ordered);
        std::stable_sort(last, works.end(), [](const auto& a, const auto& b) { return a.second > b.second; });
      }
      for (const auto& [number, visits] : works) places.push_back(number);
    }
    places.insert(places.end(), 2, kNoMoreWorks);
    return places;
  }

  void check(Order order) {
    params_.turns.tracks = std::min(params_.batch * params_.key_heads, tracks_);
    const std::vector<std::int32_t> wanted = expected(order);
    const DeviceMemory chunks(chunks_), units(units_);
    params_.plan.chunks = static_cast<const ChunkKeys*>(chunks.get());
    params_.plan.tile_units = params_.plan.tile_full = static_cast<const std::uint16_t*>(units.get());
    const std::int64_t entries =
        key_work_entries(params_.batch, params_.key_heads, params_.splits, params_.plan.chunk_count);
    const DeviceMemory starts(static_cast<std::size_t>(entries + 1) * sizeof(std::int32_t)),
        first_tiles(static_cast<std::size_t>(entries) * sizeof(std::int32_t)),
        blocks(static_cast<std::size_t>(key_blocks<kTileKeys, true>(params_)) * sizeof(KeyBlock)),
        last(kMostOrderedBlocks * sizeof(std::int32_t)), taken(sizeof(std::int32_t));
    params_.works = {static_cast<std::int32_t*>(starts.get()), static_cast<std::int32_t*>(first_tiles.get()),
                     static_cast<KeyBlock*>(blocks.get()),
                     order == Order::kLongestFirst ? static_cast<std::int32_t*>(last.get()) : nullptr,
                     static_cast<std::int32_t*>(taken.get())};
    if (order == Order::kTurns) params_.turns.queries = params_.works.taken;  // any address: they are not read
    expect_success(list_key_works(params_, kTileKeys, 2 * params_.processors, nullptr));
    const std::int64_t places = std::ssize(wanted);
    const DeviceMemory wanted_numbers(wanted), read(static_cast<std::size_t>(places) * sizeof(std::int32_t));
    auto* numbers = static_cast<std::int32_t*>(read.get());
    expect_success(launch_blocks(read_works<kTileKeys>, {places, kWarp}, nullptr, params_,
                                 static_cast<const std::int32_t*>(wanted_numbers.get()), numbers));
    EXPECT_EQ(to_host(numbers, places), wanted);
    EXPECT_EQ(to_host(params_.works.taken, 1)[0], 0);
  }

 private:
  BackwardParams params_;
  int tracks_;  // at most
  std::vector<ChunkKeys> chunks_;
  std::vector<std::uint16_t> units_;
};

template <int kTileKeys>
void check_rounds(int seed) {
  Rng rng(static_cast<unsigned>(seed));
  for (int round = 0; round < rounds(1000); ++round) {
    SCOPED_TRACE(round);
    Launch<kTileKeys> launch(rng, 4, 8);
    launch.check(static_cast<typename Launch<kTileKeys>::Order>(round % 3));
    if (testing::Test::HasFailure()) return;
  }
}

TEST(KeyWorks, TilesOf32Keys) { check_rounds<32>(5); }
TEST(KeyWorks, TilesOf64Keys) { check_rounds<64>(1); }
TEST(KeyWorks, TilesOf128Keys) { check_rounds<128>(2); }

// Which tile of keys a tile of rows meets before another one.
TEST(KeyWorks, PreviousTiles) {
  Rng rng(4);
  for (int round = 0; round < rounds(200); ++round) {
    SCOPED_TRACE(round);
    Launch<128>(rng, 3, 8).check_previous_tiles<64>(1 + round % 4);
    Launch<128>(rng, 3, 8).check_previous_tiles<128>(1 + round % 4);
    Launch<64>(rng, 2, 100).check_previous_tiles<64>(1 + round % 4);
    if (HasFailure()) return;
  }
}

// More entries than the kernel has threads, and more works than are put in order.
TEST(KeyWorks, ManyChunks) {
  Rng rng(3);
  for (int round = 0; round < rounds(40); ++round) {
    Launch<64>(rng, 400, 12).check(static_cast<Launch<64>::Order>(round % 3));
  }
}

}  // namespace
}  // namespace flash_dmattn::internal::cuda
