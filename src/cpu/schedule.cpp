#include "cpu/schedule.h"

#include <algorithm>
#include <iterator>

#include "core/rounding.h"
#include "cpu/config.h"

namespace flash_dmattn::internal::cpu {
namespace {

// Deterministic calls are cut up as if for this many workers, whatever their real number.
constexpr int kNominalConcurrency = 8;
// Units per worker that even out their lengths.
constexpr std::int64_t kUnitsPerWorker = 4;
// A chunk's bitmap stays below this.
constexpr std::int64_t kMaxBitmapBytes = 8 << 20;
// Rows of a chunk whose rows have lists of keys of their own, at most.
constexpr std::int64_t kListedChunkRows = 128;
// Rows of a strip of the bias's gradient: Sk floats each.
constexpr int kStripRows = 2 * kBackwardRowTile;

bool is_shared_in_group(const BroadcastView& view, std::int64_t group) {
  return !view.defined() || view.head_stride == 0 || view.head_divisor >= group;
}

// Rows per chunk, a multiple of `row_tile`: enough to pay for packing keys, few enough that `target_units`
// units remain where `units_per_chunk` run side by side, and that bitmaps stay small.
int choose_chunk_rows(const AttentionProblem& problem, int pass_heads, int row_tile, std::int64_t units_per_chunk,
                      std::int64_t target_units) {
  std::int64_t rows = round_up(ceil_div(kChunkRowsTarget, pass_heads), row_tile);
  const std::int64_t smallest = std::max<std::int64_t>(row_tile, round_up(ceil_div(128, pass_heads), row_tile));
  while (rows > smallest && units_per_chunk * ceil_div(problem.rows, rows) < target_units) {
    rows = std::max(smallest, round_up(rows / 2, row_tile));
  }
  // Neighbouring rows choose alike, the farther apart the less: a larger chunk would compute more that no row keeps.
  if (problem.visibility.indices.differ_by_row()) rows = std::min(rows, round_up(kListedChunkRows, row_tile));
  if (needs_bitmap(problem.visibility)) {
    const std::int64_t fitting = kMaxBitmapBytes * 8 / std::max<std::int64_t>(problem.keys, 1);
    rows = std::min(rows, std::max<std::int64_t>(fitting / row_tile * row_tile, row_tile));
  }
  return static_cast<int>(std::min(rows, round_up(problem.rows, row_tile)));
}

// Splits cost a dK and dV each: as few as leave the workers idle for at most a seventh of the time.
std::int64_t choose_splits(std::int64_t groups, std::int64_t concurrency, std::int64_t chunks) {
  std::int64_t splits = 1;
  const auto idles = [&] {
    const std::int64_t units = groups * splits;
    return 7 * (round_up(units, concurrency) - units) > round_up(units, concurrency);
  };
  while (splits < chunks && idles()) ++splits;
  return splits;
}

}  // namespace

bool plan_is_shared_in_group(const AttentionProblem& problem) {
  const std::int64_t group = problem.group();
  const VisibilityViews& visibility = problem.visibility;
  const BroadcastView* views[] = {&visibility.mask, &visibility.intervals.begin, &visibility.intervals.end,
                                  &visibility.indices.entries, &visibility.indices.lengths};
  return std::all_of(std::begin(views), std::end(views),
                     [&](const BroadcastView* view) { return is_shared_in_group(*view, group); });
}

ForwardSchedule make_forward_schedule(const AttentionProblem& problem, int concurrency) {
  if (problem.deterministic) concurrency = kNominalConcurrency;
  const std::int64_t target_units = kUnitsPerWorker * concurrency;
  ForwardSchedule schedule;
  schedule.pass_heads = plan_is_shared_in_group(problem) ? static_cast<int>(problem.group()) : 1;
  schedule.chunk_rows =
      choose_chunk_rows(problem, schedule.pass_heads, kForwardRowTile, problem.batch * problem.key_heads, target_units);
  schedule.chunks = ceil_div(problem.rows, schedule.chunk_rows);
  if (differs_by_row_and_key(problem.visibility) && !differs_by_head(problem.visibility)) {
    // Reading a mask costs as much as several products: share the plan as far as the workers allow.
    const std::int64_t runs = ceil_div(target_units, problem.batch * schedule.chunks);
    schedule.unit_key_heads = ceil_div(problem.key_heads, std::min(runs, problem.key_heads));
  }
  schedule.head_runs = ceil_div(problem.key_heads, schedule.unit_key_heads);
  schedule.units = problem.batch * schedule.head_runs * schedule.chunks;
  return schedule;
}

ForwardSchedule::Unit ForwardSchedule::unit(const AttentionProblem& problem, std::int64_t index) const {
  const std::int64_t side_by_side = problem.batch * head_runs;
  const std::int64_t chunk = chunks - 1 - index / side_by_side;  // later rows see more keys
  const std::int64_t pair = index % side_by_side;
  Unit unit{};
  unit.batch = pair / head_runs;
  unit.key_head_begin = pair % head_runs * unit_key_heads;
  unit.key_head_end = std::min(unit.key_head_begin + unit_key_heads, problem.key_heads);
  unit.row_begin = chunk * chunk_rows;
  unit.rows = static_cast<int>(std::min<std::int64_t>(chunk_rows, problem.rows - unit.row_begin));
  return unit;
}

BackwardSchedule make_backward_schedule(const BackwardProblem& problem, int concurrency) {
  if (problem.deterministic) concurrency = kNominalConcurrency;
  BackwardSchedule schedule;
  schedule.pass_heads = plan_is_shared_in_group(problem) ? static_cast<int>(problem.group()) : 1;
  if (problem.dbias.defined()) {
    const BroadcastView& bias = problem.dbias;
    const bool full_rows = bias.rows == problem.rows && problem.rows > 1;
    const bool full_heads = bias.heads == problem.heads;
    const bool full_keys = bias.keys == problem.keys;
    if (!full_rows) {
      schedule.bias_gradient = BiasGradient::kColumns;
    } else if (bias.batches == problem.batch && full_heads && full_keys) {
      schedule.bias_gradient = BiasGradient::kDirect;
    } else {
      schedule.bias_gradient = BiasGradient::kStrip;
      if (bias.batches < problem.batch) schedule.group_batches = problem.batch;
      if (bias.heads == 1) schedule.group_key_heads = problem.key_heads;
      // A strip belongs to one head of the bias at a time.
      if (full_heads) schedule.pass_heads = 1;
    }
  }
  schedule.head_groups = ceil_div(problem.key_heads, schedule.group_key_heads);
  const std::int64_t groups = ceil_div(problem.batch, schedule.group_batches) * schedule.head_groups;
  schedule.chunk_rows = choose_chunk_rows(problem, schedule.pass_heads, kBackwardRowTile, groups, concurrency);
  if (schedule.bias_gradient == BiasGradient::kStrip) schedule.chunk_rows = std::min(schedule.chunk_rows, kStripRows);
  schedule.chunks = ceil_div(problem.rows, schedule.chunk_rows);
  schedule.splits = choose_splits(groups, concurrency, schedule.chunks);
  schedule.units = groups * schedule.splits;
  return schedule;
}

BackwardSchedule::Unit BackwardSchedule::unit(std::int64_t index) const {
  const std::int64_t group = index / splits;
  return {group / head_groups * group_batches, group % head_groups * group_key_heads, index % splits};
}

std::int64_t BackwardSchedule::chunk(std::int64_t split, std::int64_t step) const {
  const std::int64_t chunk = step * splits + (step % 2 == 0 ? split : splits - 1 - split);
  return chunk < chunks ? chunk : -1;
}

}  // namespace flash_dmattn::internal::cpu
