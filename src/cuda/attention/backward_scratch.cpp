#include "cuda/attention/backward_scratch.h"

#include <algorithm>
#include <limits>
#include <string>

#include "core/rounding.h"
#include "cuda/attention/call.h"
#include "cuda/attention/head_dims.h"
#include "cuda/attention/key_block.h"
#include "cuda/attention/key_tile_order.h"
#include "cuda/attention/key_works.h"

namespace flash_dmattn::internal::cuda {
namespace {

// Sums that many blocks add to begin with a cache line: else every addition of a warp touches one line more (2 %
// slower).
constexpr std::size_t kLineBytes = 128;

// From so many bytes of sums of dquery on it is asked which rows need none (MetOnceTiles): that takes 7 us, in which
// smaller sums, which stay in the cache, are cleared and read.
constexpr std::size_t kLeastStoredBytes = std::size_t{16} << 20;

}  // namespace

void BackwardScratch::arrange(const BackwardProblem& problem, BackwardTiles family_tiles, Arena* arena) {
  tiles = family_tiles;
  // Works add to a key's sums in the order of lists, but those of one list at the same time.
  prepared.arrange(problem, arena, problem.deterministic);
  const auto bucket = static_cast<std::size_t>(bucket_of(wider_head_dim(problem)));
  deterministic = problem.deterministic;
  const std::int64_t row_tiles = problem.batch * problem.heads * ((problem.rows + tiles.rows - 1) / tiles.rows);
  const auto row_count = static_cast<std::size_t>(row_tiles * tiles.rows);
  row_facts = arena->take<RowFacts>(2 * row_count);
  const auto own_rows = static_cast<std::size_t>(problem.batch * problem.heads * problem.rows);
  if (problem.sink.defined() && problem.row_stats != nullptr) row_stats = arena->take<RowStats>(own_rows);
  if (problem.dsink.defined()) sink_parts = arena->take<float>(own_rows);
  arrange_order(problem, arena);
  const std::size_t before = arena->used();
  counters = arena->take<BackwardCounters>(1);
  if (takes_turns()) arrange_turns(problem, row_tiles, arena);
  if (tiles.stays() && !takes_turns() && !prepared.planned) arrange_tile_order(problem, arena);
  const std::int64_t keys = problem.batch * problem.key_heads * problem.keys;
  key_sums.tile_keys = tiles.keys;
  if (prepared.planned) {
    share_marks(problem, prepared.plan, &key_sums);
    const std::int64_t rows = key_sums.mark_rows(problem.batch, problem.key_heads);
    key_sums.marks = arena->take<std::uint8_t>(static_cast<std::size_t>(rows * problem.keys));
  }
  if (problem.dbias.defined()) arrange_bias(problem, arena);
  cleared_bytes = arena->used() - before;
  if (problem.dquery.defined() && (!deterministic || takes_turns())) {
    dquery_sums = arena->take_aligned<float>(static_cast<std::size_t>(dquery_colors) * row_count * bucket, kLineBytes);
    const std::size_t sum_bytes = row_count * bucket * sizeof(float);
    if (tiles.stored_share > 0 && prepared.planned && !takes_turns() && sum_bytes >= kLeastStoredBytes) {
      const DevicePlan& plan = prepared.plan;
      const std::int64_t plans = (plan.per_batch ? problem.batch : 1) * plan.plan_heads;
      met_once.tiles = arena->take<std::uint32_t>(static_cast<std::size_t>(plans * plan.chunk_count));
      met_once.row_tile = tiles.rows, met_once.tile_keys = tiles.keys, met_once.least_share = tiles.stored_share;
      if (counters != nullptr) met_once.visits = counters->visits;
    }
  }
  key_sums.key_columns = static_cast<int>(bucket);
  key_sums.value_columns = tiles.value_columns;
  const auto bytes_of = [&](int columns) {
    return static_cast<std::size_t>(keys * key_sums.colors * columns) * sizeof(float);
  };
  key_bytes = bytes_of(key_sums.key_columns), value_bytes = bytes_of(key_sums.value_columns);
  const auto take_sums = [&](std::size_t bytes) {
    return arena->take_aligned<float>(bytes / sizeof(float), kLineBytes);
  };
  if (wants_sums && problem.dkey.defined()) key_sums.dkey = take_sums(key_bytes);
  if (wants_sums && problem.dvalue.defined()) key_sums.dvalue = take_sums(value_bytes);
  if (prepared.planned && splits == 1) {
    key_sums.stored = arena->take<std::uint8_t>(static_cast<std::size_t>(problem.batch * problem.key_heads));
  }
}

void BackwardScratch::arrange_turns(const BackwardProblem& problem, std::int64_t row_tiles, Arena* arena) {
  turns.tracks = static_cast<std::int32_t>(std::min<std::int64_t>(problem.batch * problem.key_heads, kMostKeyTracks));
  // A tile of 128 keys follows the one before it at a distance of about two steps, one of 64, for wide heads, of three.
  // Where works have few of these, more tiles of a list would be under way at the same time than can be: they add to
  // several sums by turns. To as many as on a large GPU on all, and whatever is known of masks, so that results are the
  // same.
  if (prepared.planned) {
    constexpr std::int64_t kProcessors = 132, kMostColors = 4;
    const std::int64_t distance = tiles.keys < 128 ? 3 : 2;
    const std::int64_t rows = std::min<std::int64_t>(problem.rows, kChunkRows);
    const std::int64_t steps = std::max<std::int64_t>(1, problem.group() * rows / tiles.rows);
    const std::int64_t at_once = kProcessors / turns.tracks;  // of a key head
    dquery_colors =
        static_cast<std::int32_t>(std::clamp<std::int64_t>((distance * at_once + steps - 1) / steps, 1, kMostColors));
  }
  const std::int64_t numbers =
      dquery_colors * row_tiles + problem.batch * problem.key_heads + problem.batch * problem.heads;
  turns.queries = arena->take<std::int32_t>(static_cast<std::size_t>(numbers));
  if (turns.queries == nullptr) return;  // the arena measures
  turns.keys = turns.queries + dquery_colors * row_tiles;
  turns.bias = turns.keys + problem.batch * problem.key_heads;
}

void BackwardScratch::arrange_order(const BackwardProblem& problem, Arena* arena) {
  const std::int64_t group = problem.group();
  const std::int64_t key_blocks =
      ceil_div(problem.keys, tiles.keys) * tiles.own_blocks * problem.batch * problem.key_heads;
  // Heads that see different keys have lists of their own; and a few tiles of keys alone leave most of a GPU idle,
  // the more so where they see different numbers of rows.
  const std::int64_t few_blocks = prepared.planned ? 256 : 128;
  // Ordering takes 5 to 10 us, a tenth or more of all the rest where a bool mask shows a few keys a row.
  const bool orders = prepared.visibility.begin.defined() || key_blocks >= few_blocks;
  // Works that wait for turns come as they are numbered.
  order = take_order(prepared.planned && orders && !takes_turns(), arena);
  const bool own_lists = prepared.planned && prepared.plan.head_divisor < group;
  // Blocks that stay divide tiles otherwise (arrange_tile_order).
  const bool few = key_blocks < few_blocks && !deterministic && (prepared.planned || !tiles.stays());
  splits = own_lists || few ? static_cast<std::int32_t>(group) : 1;
  wants_sums = prepared.planned || splits > 1;
  if (prepared.planned) {
    const std::int64_t entries = key_work_entries(problem.batch, problem.key_heads, splits, prepared.plan.chunk_count);
    works.starts = arena->take<std::int32_t>(static_cast<std::size_t>(entries + 1));
    works.first_tiles = arena->take<std::int32_t>(static_cast<std::size_t>(entries));
    works.blocks =
        arena->take<KeyBlock>(static_cast<std::size_t>(count_key_blocks(problem, prepared.plan.chunk_count)));
  }
  launch_chunks = prepared.plan.chunk_count;
  if (!adds_by_launches()) return;
  // As few chunks a launch as fill a large GPU a few times over; the same on every GPU, so that results are, too.
  constexpr std::int64_t kManyBlocks = 1024;
  const std::int64_t chunk_blocks =
      std::max<std::int64_t>(1, prepared.plan.capacity / tiles.keys * problem.batch * problem.key_heads * splits);
  launch_chunks = static_cast<std::int32_t>(
      std::clamp<std::int64_t>((kManyBlocks + chunk_blocks - 1) / chunk_blocks, 1, prepared.plan.chunk_count));
  key_sums.colors = launch_chunks * splits;
}

void BackwardScratch::arrange_tile_order(const BackwardProblem& problem, Arena* arena) {
  // From a work's last step to the next one's first it takes as long as three steps of 64 rows.
  constexpr double kWorkRows = 3 * 64;
  const KeyTiles keys = {.heads = problem.batch * problem.key_heads * splits,
                         .tiles = ceil_div(problem.keys, tiles.keys),
                         .steps = ceil_div(problem.rows, tiles.rows) * (problem.group() / splits),
                         .work_steps = kWorkRows / tiles.rows,
                         .is_causal = problem.visibility.is_causal};
  tile_order = order_key_tiles(keys, tiles.stays_on / tiles.own_blocks);
  const auto cut = static_cast<std::size_t>(cut_tiles(keys, tile_order));
  if (cut == 0) return;
  const auto width = static_cast<std::size_t>(bucket_of(wider_head_dim(problem)));
  tile_order.added = arena->take<std::int32_t>(cut * kMostTileWarps);
  tile_order.sums = arena->take_aligned<float>(cut * 2 * static_cast<std::size_t>(tiles.keys) * width, kLineBytes);
}

void BackwardScratch::arrange_bias(const BackwardProblem& problem, Arena* arena) {
  dbias = problem.dbias;
  dbias_count = static_cast<std::size_t>(bias_elements(problem.dbias));
  if (tiles.stores_dbias) {
    bias_sums = BiasSums::kStored;
    return;
  }
  // A bias gradient with rows has one owner for each of them then; one without needs its parts kept apart.
  const bool by_head = deterministic && problem.dbias.rows == 1;
  if (by_head) {
    dbias.batches = problem.batch, dbias.heads = problem.heads, dbias.keys = problem.keys;
    dbias.batch_stride = problem.heads * problem.keys, dbias.head_stride = problem.keys, dbias.key_stride = 1;
    dbias.head_divisor = 1;
    dbias_count = static_cast<std::size_t>(problem.batch * problem.heads * problem.keys);
  }
  dbias_bytes = dbias_count * sizeof(float) * static_cast<std::size_t>(by_head ? key_sums.colors : 1);
  bias_sums = by_head                                  ? BiasSums::kByHead
              : problem.dbias.dtype == DType::kFloat32 ? BiasSums::kInPlace
                                                       : BiasSums::kRounded;
  dbias_sums = bias_sums == BiasSums::kInPlace ? static_cast<float*>(problem.dbias.data)
                                               : arena->take<float>(dbias_bytes / sizeof(float));
}

std::int64_t BackwardScratch::count_key_blocks(const BackwardProblem& problem, std::int64_t chunks) const {
  const std::int64_t key_tiles = (problem.keys + tiles.keys - 1) / tiles.keys,
                     list_tiles = prepared.plan.capacity / tiles.keys;
  return (key_tiles + list_tiles * chunks) * problem.batch * problem.key_heads * splits;
}

Status BackwardScratch::check_key_blocks(const BackwardProblem& problem) const {
  if (count_key_blocks(problem, launch_chunks) <= std::numeric_limits<std::int32_t>::max()) return {};
  return Status::invalid("key", "must have fewer than 2^31 tiles of keys in a backward on CUDA, listed ones included",
                         "B " + std::to_string(problem.batch) + ", Sk " + std::to_string(problem.keys) + ", Hkv " +
                             std::to_string(problem.key_heads));
}

}  // namespace flash_dmattn::internal::cuda
