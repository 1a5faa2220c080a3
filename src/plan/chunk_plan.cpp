#include "plan/chunk_plan.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "plan/arena.h"

namespace flash_dmattn::internal {
namespace {

// A mask needs a bitmap when both its rows and its keys differ.
bool needs_bitmap(const BroadcastView& mask) { return mask.defined() && mask.row_stride != 0 && mask.key_stride != 0; }

int padded_rows(int rows, int row_tile) { return (rows + row_tile - 1) / row_tile * row_tile; }

struct Scratch {
  std::int32_t* prefix;
  std::int32_t* keys;
  std::uint64_t* key_union;
  std::uint64_t* bits;
  TileClass* classes;
  std::size_t bytes;
};

Scratch take_scratch(const AttentionProblem& problem, int chunk_rows, int row_tile, void* block) {
  Arena arena(block);
  const auto rows = static_cast<std::size_t>(padded_rows(chunk_rows, row_tile));
  const auto words = static_cast<std::size_t>(words_for(problem.keys));
  Scratch scratch{};
  scratch.prefix = arena.take<std::int32_t>(rows);
  scratch.classes = arena.take<TileClass>(rows / row_tile * words);
  if (problem.mask.defined()) {
    scratch.keys = arena.take<std::int32_t>(static_cast<std::size_t>(problem.keys));
    scratch.key_union = arena.take<std::uint64_t>(words);
  }
  if (needs_bitmap(problem.mask)) scratch.bits = arena.take<std::uint64_t>(rows * words);
  scratch.bytes = arena.used();
  return scratch;
}

}  // namespace

std::int64_t count_visible(const ChunkPlan& plan) {
  std::int64_t count = 0;
  for (int row = 0; row < plan.rows; ++row) {
    if (plan.bits == nullptr) {
      count += plan.prefix[row];
    } else {
      for (int tile = 0; tile < plan.key_tiles(); ++tile) count += std::popcount(plan.visible(row, tile));
    }
  }
  return count;
}

std::size_t ChunkPlanner::scratch_bytes(const AttentionProblem& problem, int chunk_rows, int row_tile) {
  return take_scratch(problem, chunk_rows, row_tile, nullptr).bytes;
}

ChunkPlanner::ChunkPlanner(const AttentionProblem& problem, int chunk_rows, int row_tile, void* block)
    : problem_(problem) {
  const Scratch scratch = take_scratch(problem, chunk_rows, row_tile, block);
  prefix_ = scratch.prefix;
  keys_ = scratch.keys;
  union_ = scratch.key_union;
  bits_ = scratch.bits;
  classes_ = scratch.classes;
  plan_.row_tile = row_tile;
}

const ChunkPlan& ChunkPlanner::plan(std::int64_t batch, std::int64_t head, std::int64_t row_begin, int rows) {
  key_limit_ = problem_.key_count(batch);
  plan_.row_begin = row_begin;
  plan_.rows = rows;
  plan_.key_begin = 0;
  plan_.keys = nullptr;
  plan_.prefix = prefix_;
  plan_.bits = nullptr;
  plan_.classes = classes_;

  const BroadcastView& mask = problem_.mask;
  if (!mask.defined()) {
    plan_prefixes(nullptr);
  } else {
    const auto* bools =
        static_cast<const std::uint8_t*>(mask.data) + mask.offset(batch, head) + row_begin * mask.row_stride;
    if (needs_bitmap(mask)) {
      plan_bitmap(bools);
    } else if (mask.key_stride != 0) {
      plan_key_list(bools);
    } else {
      plan_prefixes(bools);
    }
  }
  classify();
  return plan_;
}

std::int64_t ChunkPlanner::causal_limit(std::int64_t row) const {
  if (!problem_.is_causal) return key_limit_;
  return std::clamp<std::int64_t>(row + key_limit_ - problem_.rows + 1, 0, key_limit_);
}

void ChunkPlanner::plan_prefixes(const std::uint8_t* mask) {
  plan_.key_count = 0;
  for (int row = 0; row < plan_.rows; ++row) {
    const bool row_visible = mask == nullptr || mask[row * problem_.mask.row_stride] != 0;
    prefix_[row] = row_visible ? static_cast<std::int32_t>(causal_limit(plan_.row_begin + row)) : 0;
    plan_.key_count = std::max(plan_.key_count, prefix_[row]);
  }
}

void ChunkPlanner::plan_key_list(const std::uint8_t* mask) {
  const std::int64_t limit = causal_limit(plan_.row_begin + plan_.rows - 1);
  pack_bools(mask, problem_.mask.key_stride, limit, union_);
  list_keys(union_, words_for(limit));
  // Limits grow with the row: one walk over the list ranks them all.
  std::int32_t rank = 0;
  for (int row = 0; row < plan_.rows; ++row) {
    const std::int64_t row_limit = causal_limit(plan_.row_begin + row);
    while (rank < plan_.key_count && plan_.key(rank) < row_limit) ++rank;
    prefix_[row] = rank;
  }
}

void ChunkPlanner::plan_bitmap(const std::uint8_t* mask) {
  const std::int64_t words = words_for(causal_limit(plan_.row_begin + plan_.rows - 1));
  std::fill_n(union_, words, 0);
  for (int row = 0; row < plan_.rows; ++row) {
    const std::int64_t limit = causal_limit(plan_.row_begin + row);
    std::uint64_t* row_bits = bits_ + row * words;
    pack_bools(mask + row * problem_.mask.row_stride, problem_.mask.key_stride, limit, row_bits);
    std::fill(row_bits + words_for(limit), row_bits + words, 0);
    for (std::int64_t word = 0; word < words; ++word) union_[word] |= row_bits[word];
  }
  list_keys(union_, words);
  const bool already_compact = plan_.keys == nullptr && plan_.key_begin == 0;
  for (int row = 0; row < plan_.rows && !already_compact; ++row) compact_bits(union_, words, bits_ + row * words);
  plan_.bits = bits_;
  plan_.bits_pitch = words;
}

void ChunkPlanner::list_keys(const std::uint64_t* seen, std::int64_t words) {
  plan_.key_count = static_cast<std::int32_t>(list_bits(seen, words, 0, keys_));
  plan_.key_begin = plan_.key_count > 0 ? keys_[0] : 0;
  const bool is_range = plan_.key_count == 0 || keys_[plan_.key_count - 1] - plan_.key_begin + 1 == plan_.key_count;
  plan_.keys = is_range ? nullptr : keys_;
}

void ChunkPlanner::classify() {
  const int tiles = plan_.key_tiles();
  for (int row_tile = 0; row_tile < plan_.row_tiles(); ++row_tile) {
    const int first = row_tile * plan_.row_tile;
    const int end = std::min(first + plan_.row_tile, plan_.rows);
    TileClass* classes = classes_ + static_cast<std::int64_t>(row_tile) * tiles;
    std::int32_t least = 0, most = 0;
    if (plan_.bits == nullptr) {
      const auto [low, high] = std::minmax_element(prefix_ + first, prefix_ + end);
      least = *low;
      most = *high;
    }
    for (int tile = 0; tile < tiles; ++tile) {
      const std::int64_t key = static_cast<std::int64_t>(tile) * kKeyTile;
      std::uint64_t any = low_bits(most - key), all = low_bits(least - key);
      if (plan_.bits != nullptr) {
        any = 0;
        all = ~std::uint64_t{0};
        for (int row = first; row < end; ++row) {
          any |= plan_.visible(row, tile);
          all &= plan_.visible(row, tile);
        }
      }
      // A tile of fewer keys than its width is never full: what lies beyond must be masked off.
      classes[tile] = any == 0 ? TileClass::kEmpty : ~all == 0 ? TileClass::kFull : TileClass::kPartial;
    }
  }
}

}  // namespace flash_dmattn::internal
