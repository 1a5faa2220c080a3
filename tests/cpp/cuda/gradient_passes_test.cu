// Which sums of keys a backward clears, and what it makes of them, of plans that have some of the keys. Which tiles of
// rows a plan's tiles of keys meet once.
#include "cuda/attention/gradient_passes.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda/attention/head_dims.h"
#include "plan_testing.h"
#include "rounds.h"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// A plan of which nothing but the chunks' keys is there.
template <typename Element>
class Call {
 public:
  // `is_long`: a thread looks at many keys.
  Call(Rng& rng, bool is_long) {
    problem_.dtype = std::is_same_v<Element, __half> ? DType::kFloat16 : DType::kBFloat16;
    const int group = uniform(rng, 1, 3);
    problem_.batch = uniform(rng, 1, 3), problem_.key_heads = uniform(rng, 1, 3);
    problem_.keys = uniform(rng, 1, 700);
    constexpr int kHeadDims[] = {1, 8, 20, 33, 64, 96, 128, 200, 256};
    problem_.head_dim = kHeadDims[rng() % 9], problem_.value_dim = kHeadDims[rng() % 9];
    if (is_long) problem_.batch = problem_.key_heads = 1, problem_.keys = 70000, problem_.head_dim = 256;
    problem_.heads = problem_.key_heads * group;
    width_ = bucket_of(wider_head_dim(problem_));
    sums_.key_columns = sums_.value_columns = width_;
    sums_.colors = rng() % 3 == 0 ? 3 : 1;
    sums_.tile_keys = 32 << rng() % 3;
    has_dkey_ = rng() % 4 != 0, has_dvalue_ = rng() % 4 != 0;
    // Without lists of their own query heads of a group share sums, and heads without lists store results themselves.
    own_lists_ = rng() % 3 == 0;
    plan_.chunk_count = uniform(rng, 1, 5);
    plan_.per_batch = rng() % 2 == 0;
    plan_.plan_heads = static_cast<std::int32_t>(own_lists_ ? problem_.heads : rng() % 2 == 0 ? problem_.key_heads : 1);
    plan_.head_divisor = problem_.heads / plan_.plan_heads;
    plan_.capacity = static_cast<std::int32_t>(is_long ? problem_.keys / 128 * 128 : 128 * uniform(rng, 1, 3));
    make_chunks(rng, is_long);
    make_sums(rng);
    share_marks(problem_, plan_, &sums_);
  }

  std::string name() const {
    return std::to_string(problem_.batch) + " x " + std::to_string(problem_.keys) + " x " +
           std::to_string(problem_.key_heads) + " x " + std::to_string(problem_.head_dim) + ", " +
           std::to_string(problem_.value_dim) + ", " + std::to_string(sums_.colors) + " colors" +
           (own_lists_ ? ", own lists" : "");
  }

  void run_and_check() {
    const DeviceMemory chunks(chunks_), listed(listed_);
    plan_.chunks = static_cast<const ChunkKeys*>(chunks.get());
    plan_.keys = static_cast<const std::int32_t*>(listed.get());
    const std::int64_t pairs = problem_.batch * problem_.key_heads;
    const DeviceMemory marks(std::vector<std::uint8_t>(static_cast<std::size_t>(pairs * problem_.keys)));
    const DeviceMemory stored(static_cast<std::size_t>(pairs));
    const DeviceMemory dkey_sums(std::vector<float>(dkey_sums_.size(), kNaN));
    const DeviceMemory dvalue_sums(std::vector<float>(dvalue_sums_.size(), kNaN));
    sums_.marks = static_cast<std::uint8_t*>(marks.get());
    sums_.stored = own_lists_ ? nullptr : static_cast<std::uint8_t*>(stored.get());
    sums_.dkey = has_dkey_ ? static_cast<float*>(dkey_sums.get()) : nullptr;
    sums_.dvalue = has_dvalue_ ? static_cast<float*>(dvalue_sums.get()) : nullptr;
    expect_success(launch_mark_keys(problem_, plan_, sums_, {}, nullptr));
    expect_success(launch_clear_key_sums(problem_, sums_, false, nullptr));
    const auto got_marks = to_host(static_cast<const std::uint8_t*>(sums_.marks), pairs * problem_.keys);
    std::int64_t wrong = 0;
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      const std::int64_t got = mark_row(pair) * problem_.keys, own = pair * problem_.keys;
      for (std::int64_t key = 0; key < problem_.keys; ++key) {
        const bool is_marked = got_marks[static_cast<std::size_t>(got + key)] != 0;
        wrong += is_marked != marked_[static_cast<std::size_t>(own + key)] ? 1 : 0;
      }
    }
    EXPECT_EQ(wrong, 0) << "wrong marks";
    if (sums_.stored != nullptr) {
      const auto got = to_host(static_cast<const std::uint8_t*>(sums_.stored), pairs);
      for (std::int64_t pair = 0; pair < pairs; ++pair) {
        EXPECT_EQ(got[static_cast<std::size_t>(pair)] != 0, stores(pair)) << "head " << pair;
      }
    }
    if (has_dkey_) check_cleared(static_cast<const float*>(dkey_sums.get()));
    if (has_dvalue_) check_cleared(static_cast<const float*>(dvalue_sums.get()));
    check_gradients();
  }

 private:
  // Heads of one plan are marked once.
  std::int64_t mark_row(std::int64_t pair) const {
    if (plan_.plan_heads > problem_.key_heads) return pair;
    const std::int64_t batch = plan_.per_batch ? pair / problem_.key_heads : 0;
    return batch * plan_.plan_heads + pair % problem_.key_heads / (problem_.key_heads / plan_.plan_heads);
  }
  std::size_t plan_of(std::int64_t pair, int head_of_group) const {
    const std::int64_t head = pair % problem_.key_heads * problem_.group() + head_of_group;
    return static_cast<std::size_t>(plan_.first_chunk(pair / problem_.key_heads, head));
  }
  bool has_list(std::int64_t pair) const {
    const ChunkKeys* first = &chunks_[plan_of(pair, 0)];
    return std::any_of(first, first + plan_.chunk_count,
                       [](const ChunkKeys& chunk) { return chunk.first < 0 && chunk.count > 0; });
  }
  bool stores(std::int64_t pair) const { return !own_lists_ && !has_list(pair); }

  void make_chunks(Rng& rng, bool has_lists) {
    const auto keys = static_cast<int>(problem_.keys);
    const auto count =
        static_cast<std::size_t>((plan_.per_batch ? problem_.batch : 1) * plan_.plan_heads * plan_.chunk_count);
    chunks_.resize(count);
    listed_.assign(count * static_cast<std::size_t>(plan_.capacity), -1);
    const int kinds = has_lists ? 1 : uniform(rng, 0, 2);  // ranges, lists, both
    for (std::size_t chunk = 0; chunk < count; ++chunk) {
      if (kinds == 1 || (kinds == 2 && rng() % 2 == 0)) {
        chunks_[chunk] = {uniform(rng, 0, std::min(keys, plan_.capacity)), -1};
        for (int i = 0; i < chunks_[chunk].count; ++i) {
          listed_[chunk * static_cast<std::size_t>(plan_.capacity) + static_cast<std::size_t>(i)] =
              uniform(rng, 0, keys - 1);
        }
      } else {
        const int first = uniform(rng, 0, keys - 1) / kPlanTileKeys * kPlanTileKeys;
        chunks_[chunk] = {uniform(rng, 0, std::min(keys - first, keys / 3)), first};
      }
    }
    mark();
  }

  // Sets marked_.
  void mark() {
    marked_.assign(static_cast<std::size_t>(problem_.batch * problem_.key_heads * problem_.keys), false);
    for (std::int64_t pair = 0; pair < problem_.batch * problem_.key_heads; ++pair) {
      const auto add = [&](std::int64_t key) { marked_[static_cast<std::size_t>(pair * problem_.keys + key)] = true; };
      for (int head = 0; head < problem_.group(); ++head) {
        for (int i = 0; i < plan_.chunk_count; ++i) {
          const std::size_t chunk = plan_of(pair, head) + static_cast<std::size_t>(i);
          const ChunkKeys keys = chunks_[chunk];
          const std::int32_t* listed = &listed_[chunk * static_cast<std::size_t>(plan_.capacity)];
          if (keys.first < 0) {
            std::for_each(listed, listed + keys.count, add);
          } else {
            // Of a range whole tiles have sums.
            const int tile = sums_.tile_keys, last = (keys.first + keys.count - 1) / tile;
            for (std::int64_t key = 0; keys.count > 0 && key < problem_.keys; ++key) {
              if (key / tile >= keys.first / tile && key / tile <= last) add(key);
            }
          }
        }
      }
    }
  }

  void make_sums(Rng& rng) {
    const std::int64_t count = problem_.batch * problem_.keys * problem_.key_heads * width_ * sums_.colors;
    for (std::vector<float>* sums : {&dkey_sums_, &dvalue_sums_}) {
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t token = i / width_ % (problem_.batch * problem_.keys * problem_.key_heads);
        sums->push_back(is_marked(token) ? std::normal_distribution<float>()(rng) : kNaN);
      }
    }
  }
  // `token`: (B, Sk, Hkv).
  std::int64_t pair_of(std::int64_t token) const {
    return token / problem_.key_heads / problem_.keys * problem_.key_heads + token % problem_.key_heads;
  }
  bool is_marked(std::int64_t token) const {
    const std::int64_t key = token / problem_.key_heads % problem_.keys;
    return marked_[static_cast<std::size_t>(pair_of(token) * problem_.keys + key)];
  }

  // Sums are 0 where they are going to be added to, and of others nothing is known or asked.
  void check_cleared(const float* sums) const {
    const std::int64_t tokens = problem_.batch * problem_.keys * problem_.key_heads;
    const auto got = to_host(sums, tokens * width_ * sums_.colors);
    std::int64_t wrong = 0;
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(got.size()); ++i) {
      const std::int64_t token = i / width_ % tokens;
      const bool cleared = got[static_cast<std::size_t>(i)] == 0;
      wrong += cleared != (is_marked(token) && !stores(pair_of(token))) ? 1 : 0;
    }
    EXPECT_EQ(wrong, 0) << "sums that are cleared and should not be, or the other way round";
  }

  void check_gradients() {
    const std::int64_t tokens = problem_.batch * problem_.keys * problem_.key_heads;
    const DeviceMemory dkey_sums(dkey_sums_), dvalue_sums(dvalue_sums_);
    if (has_dkey_) sums_.dkey = static_cast<float*>(dkey_sums.get());
    if (has_dvalue_) sums_.dvalue = static_cast<float*>(dvalue_sums.get());
    const Element before(-77.0f);
    const DeviceMemory dkey(std::vector<Element>(static_cast<std::size_t>(tokens * problem_.head_dim), before));
    const DeviceMemory dvalue(std::vector<Element>(static_cast<std::size_t>(tokens * problem_.value_dim), before));
    const auto view = [&](const DeviceMemory& memory, std::int64_t columns) {
      const std::int64_t token = problem_.key_heads * columns;
      return TokenView{memory.get(), problem_.keys * token, token, columns};
    };
    problem_.dkey = view(dkey, problem_.head_dim), problem_.dvalue = view(dvalue, problem_.value_dim);
    expect_success(launch_key_gradients(problem_, sums_, false, nullptr));
    const auto check = [&](const DeviceMemory& memory, std::int64_t columns, const std::vector<float>& sums) {
      const auto got = to_host(static_cast<const Element*>(memory.get()), tokens * columns);
      std::int64_t wrong = 0;
      for (std::int64_t i = 0; i < tokens * columns; ++i) {
        const std::int64_t token = i / columns;
        float wanted = 0;
        for (int color = 0; color < sums_.colors && is_marked(token); ++color) {
          wanted += sums[static_cast<std::size_t>((color * tokens + token) * width_ + i % columns)];
        }
        if (stores(pair_of(token))) wanted = -77;
        const auto value = static_cast<float>(got[static_cast<std::size_t>(i)]);
        wrong += value != static_cast<float>(Element(wanted)) ? 1 : 0;
      }
      EXPECT_EQ(wrong, 0) << "wrong gradients of " << columns << " columns";
    };
    if (has_dkey_) check(dkey, problem_.head_dim, dkey_sums_);
    if (has_dvalue_) check(dvalue, problem_.value_dim, dvalue_sums_);
  }

  BackwardProblem problem_;
  DevicePlan plan_;
  KeyGradientSums sums_;
  bool own_lists_, has_dkey_, has_dvalue_;
  int width_;
  std::vector<ChunkKeys> chunks_;
  std::vector<std::int32_t> listed_;
  std::vector<bool> marked_;  // (B, Hkv, Sk)
  std::vector<float> dkey_sums_, dvalue_sums_;
};

template <typename Element>
void check_random_calls(int count, bool are_long) {
  Rng rng(7);
  for (int i = 0; i < count; ++i) {
    Call<Element> call(rng, are_long);
    SCOPED_TRACE(call.name());
    call.run_and_check();
    if (testing::Test::HasFailure()) return;
  }
}

TEST(KeySums, OfMarkedKeysAreClearedAndRounded) {
  check_random_calls<__nv_bfloat16>(rounds(400), false);
  check_random_calls<__half>(rounds(400), false);
}

// Which tiles of rows a single tile of keys meets, of plans with random units.
void check_met_once(Rng& rng) {
  BackwardProblem problem;
  problem.batch = uniform(rng, 1, 3), problem.heads = problem.key_heads = uniform(rng, 1, 3);
  problem.keys = uniform(rng, 1, 6000), problem.head_dim = problem.value_dim = 64;
  DevicePlan plan;
  plan.chunk_count = uniform(rng, 1, 5);
  plan.per_batch = true;
  plan.plan_heads = static_cast<std::int32_t>(problem.heads);
  const auto count = static_cast<std::size_t>(problem.batch * problem.heads * plan.chunk_count);
  const auto all_tiles = static_cast<std::int32_t>((problem.keys + kPlanTileKeys - 1) / kPlanTileKeys);
  plan.tiles = (all_tiles + 1) / 2 * 2;
  plan.capacity = plan.tiles * kPlanTileKeys;
  MetOnceTiles met_once;
  met_once.row_tile = rng() % 2 == 0 ? 64 : 128, met_once.tile_keys = rng() % 2 == 0 ? 64 : 128;
  const int key_parts = met_once.tile_keys / kPlanTileKeys, row_units = met_once.row_tile / kUnitRows;

  std::vector<ChunkKeys> chunks(count);
  std::vector<std::uint16_t> units(count * static_cast<std::size_t>(plan.tiles));
  std::vector<std::uint32_t> expected(count);
  unsigned long long visits = 0, once = 0;
  for (std::size_t chunk = 0; chunk < count; ++chunk) {
    const bool is_range = rng() % 2 == 0;
    const int before = is_range ? uniform(rng, 0, all_tiles - 1) : 0;
    const int tiles = uniform(rng, 0, all_tiles - before);
    chunks[chunk] = {static_cast<std::int32_t>(std::min<std::int64_t>(std::int64_t{tiles} * kPlanTileKeys,
                                                                      problem.keys - before * kPlanTileKeys)),
                     is_range ? before * kPlanTileKeys : -1};
    const int bits_of_tile = uniform(rng, 0, 3);
    std::vector<std::vector<bool>> meets(kChunkUnits / static_cast<std::size_t>(row_units),
                                         std::vector<bool>(static_cast<std::size_t>(before + tiles + 1)));
    for (int tile = 0; tile < tiles; ++tile) {
      for (int i = 0; i < bits_of_tile; ++i) {
        const int unit = uniform(rng, 0, kChunkUnits - 1);
        units[chunk * static_cast<std::size_t>(plan.tiles) + static_cast<std::size_t>(tile)] |=
            static_cast<std::uint16_t>(1u << unit);
        meets[static_cast<std::size_t>(unit / row_units)][static_cast<std::size_t>((before + tile) / key_parts)] = true;
      }
    }
    for (std::size_t row_tile = 0; row_tile < meets.size(); ++row_tile) {
      const auto meeting = std::count(meets[row_tile].begin(), meets[row_tile].end(), true);
      visits += static_cast<unsigned long long>(meeting);
      if (meeting == 1) expected[chunk] |= 1u << row_tile, ++once;
    }
  }

  const DeviceMemory device_chunks(chunks), device_units(units);
  plan.chunks = static_cast<const ChunkKeys*>(device_chunks.get());
  plan.tile_units = static_cast<const std::uint16_t*>(device_units.get());
  // Key 0 stands for all listed ones: nothing is asked of these here.
  const DeviceMemory keys(std::vector<std::int32_t>(count * static_cast<std::size_t>(plan.capacity), 0));
  plan.keys = static_cast<const std::int32_t*>(keys.get());
  const std::int64_t all_keys = problem.batch * problem.key_heads * problem.keys;
  const DeviceMemory marks(std::vector<std::uint8_t>(static_cast<std::size_t>(all_keys)));
  KeyGradientSums sums;
  sums.marks = static_cast<std::uint8_t*>(marks.get());
  const DeviceMemory tiles(std::vector<std::uint32_t>(count, ~0u)), counts(std::vector<unsigned long long>(2));
  met_once.tiles = static_cast<std::uint32_t*>(tiles.get());
  met_once.visits = static_cast<unsigned long long*>(counts.get());
  expect_success(launch_mark_keys(problem, plan, sums, met_once, nullptr));
  EXPECT_EQ(to_host(static_cast<const std::uint32_t*>(tiles.get()), static_cast<std::int64_t>(count)), expected);
  EXPECT_EQ(to_host(static_cast<const unsigned long long*>(counts.get()), 2),
            (std::vector<unsigned long long>{visits, once}));
}

TEST(MetOnce, AsThePlanSays) {
  Rng rng(3);
  for (int i = 0; i < rounds(100) && !HasFailure(); ++i) check_met_once(rng);
}

TEST(KeySums, OfManyKeys) { check_random_calls<__nv_bfloat16>(rounds(40), true); }

}  // namespace
}  // namespace flash_dmattn::internal::cuda
