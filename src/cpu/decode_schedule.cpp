#include "cpu/decode_schedule.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <type_traits>

#include "core/rounding.h"
#include "cpu/schedule.h"

namespace flash_dmattn::internal::cpu {
namespace {

// Parts of all pairs together that keep the workers of a large machine busy, and splits of one pair: what more of them
// would gain in balance they would cost in memory, merging, and fetching ahead that begins anew with each.
constexpr std::int64_t kTargetParts = 256, kMaxSplits = 16;
// A part is written, read and written again for each query row. With so many keys that is little of the work.
constexpr std::int64_t kMinSplitKeys = 1024;
constexpr std::int64_t kMinSplitKeysPerRow = 16;

// Where the rows of key heads alternate in memory, reading those of one head only wastes most of what the hardware
// prefetches: half the bandwidth or less was measured. Units attend so many heads together, at most.
constexpr std::int64_t kMaxUnitKeyHeads = 8;

// Keys planned at a time, times passes: their plans take up to 22 bytes each.
constexpr std::int64_t kPlannedKeys = 1 << 14;
constexpr std::int64_t kMinPlanKeys = 256, kMaxPlanKeys = 4096;

// Elements of K or V below which waking another worker costs more than it saves: some 40 us of one core.
constexpr std::int64_t kElementsPerWorker = 1 << 18;

// Rows of a part are padded to the longest vector of any instruction set, in floats.
constexpr std::int64_t kLongestVector = 16;

bool heads_alternate(const TokenView& tokens) { return tokens.head_stride < tokens.token_stride; }

}  // namespace

bool is_decode(const AttentionProblem& problem, bool multiplies_pairs) {
  return problem.rows <= kDecodeRows && (!multiplies_pairs || problem.rows * problem.group() <= kDecodeRowsBesidePairs);
}

DecodeSchedule make_decode_schedule(const AttentionProblem& problem) {
  DecodeSchedule schedule;
  const std::int64_t most_splits = std::min(ceil_div(kTargetParts, problem.batch * problem.key_heads), kMaxSplits);
  const std::int64_t least_keys = std::max(kMinSplitKeys, kMinSplitKeysPerRow * problem.rows * problem.group());
  schedule.split_keys = round_up(std::max(ceil_div(problem.keys, most_splits), least_keys), kTileKeys);
  schedule.splits = std::max<std::int64_t>(ceil_div(problem.keys, schedule.split_keys), 1);
  if (heads_alternate(problem.key)) {
    schedule.unit_key_heads = ceil_div(problem.key_heads, ceil_div(problem.key_heads, kMaxUnitKeyHeads));
  }
  schedule.head_runs = ceil_div(problem.key_heads, schedule.unit_key_heads);
  schedule.units = problem.batch * schedule.splits * schedule.head_runs;
  schedule.pass_heads = plan_is_shared_in_group(problem) ? static_cast<int>(problem.group()) : 1;
  const std::int64_t planned = kPlannedKeys / schedule.passes(problem) / kTileKeys * kTileKeys;
  schedule.plan_keys = std::min(std::clamp(planned, kMinPlanKeys, kMaxPlanKeys), round_up(problem.keys, kTileKeys));
  return schedule;
}

DecodeSchedule::Unit DecodeSchedule::unit(const AttentionProblem& problem, std::int64_t index) const {
  Unit unit{};
  unit.key_head_begin = index % head_runs * unit_key_heads;
  unit.key_head_end = std::min(unit.key_head_begin + unit_key_heads, problem.key_heads);
  unit.split = index / head_runs % splits;
  unit.batch = index / head_runs / splits;
  unit.keys = {unit.split * split_keys, std::min((unit.split + 1) * split_keys, problem.keys)};
  return unit;
}

int DecodeSchedule::passes(const AttentionProblem& problem) const {
  return static_cast<int>(unit_key_heads * problem.group() / pass_heads);
}

int decode_worker_count(const AttentionProblem& problem, const DecodeSchedule& schedule, int concurrency) {
  const std::int64_t elements =
      problem.batch * problem.key_heads * problem.keys * ((problem.head_dim + problem.value_dim) / 2);
  const std::int64_t worth = elements / kElementsPerWorker + 1;
  return static_cast<int>(std::min({schedule.units, worth, static_cast<std::int64_t>(std::max(concurrency, 1))}));
}

std::size_t DecodePlans::scratch_bytes(const AttentionProblem& problem, const DecodeSchedule& schedule) {
  const auto passes = static_cast<std::size_t>(schedule.passes(problem));
  const std::size_t one = ChunkPlanner::span_scratch_bytes(problem, kDecodeRows, kDecodeRows, schedule.plan_keys);
  return passes * aligned(one) + aligned(passes * sizeof(ChunkPlanner)) + aligned(passes * sizeof(ChunkPlan*));
}

DecodePlans::DecodePlans(const AttentionProblem& problem, const IndexRows& lists, const DecodeSchedule& schedule,
                         const DecodeSchedule::Unit& unit, void* scratch, AttentionCounters* counters)
    : problem_(problem),
      schedule_(schedule),
      unit_(unit),
      counters_(counters),
      span_{unit.keys.begin, unit.keys.begin},
      end_(std::min(unit.keys.end, problem.key_count(unit.batch))),
      passes_(static_cast<int>((unit.key_head_end - unit.key_head_begin) * problem.group() / schedule.pass_heads)) {
  static_assert(std::is_trivially_destructible_v<ChunkPlanner>, "nobody destroys them");
  Arena arena(scratch);
  const auto passes = static_cast<std::size_t>(passes_);
  planners_ = arena.take<ChunkPlanner>(passes);
  plans_ = arena.take<const ChunkPlan*>(passes);
  const std::size_t one = ChunkPlanner::span_scratch_bytes(problem, kDecodeRows, kDecodeRows, schedule.plan_keys);
  for (std::size_t pass = 0; pass < passes; ++pass) {
    new (planners_ + pass)
        ChunkPlanner(problem, lists, kDecodeRows, kDecodeRows, schedule.plan_keys, arena.take<std::byte>(one));
  }
}

bool DecodePlans::next() {
  if (span_.end >= end_) return false;
  span_ = {span_.end, std::min(span_.end + schedule_.plan_keys, end_)};
  const std::int64_t first_head = unit_.key_head_begin * problem_.group();
  for (int pass = 0; pass < passes_; ++pass) {
    plans_[pass] = &planners_[pass].plan(unit_.batch, first_head + pass * schedule_.pass_heads, 0,
                                         static_cast<int>(problem_.rows), span_);
    if (counters_ != nullptr) {
      count_plan(*plans_[pass], schedule_.pass_heads, counters_);
      count_visited_tiles(*plans_[pass], schedule_.pass_heads, counters_);
    }
  }
  return true;
}

DecodeParts::DecodeParts(const AttentionProblem& problem, const DecodeSchedule& schedule, Arena* arena)
    : pairs_(problem.batch * problem.key_heads),
      splits_(schedule.splits),
      rows_(problem.rows * problem.group()),
      out_stride_(static_cast<int>(round_up(problem.value_dim, kLongestVector))) {
  const auto all_rows = static_cast<std::size_t>(pairs_ * splits_ * rows_);
  maxima_ = arena->take<float>(all_rows);
  sums_ = arena->take<float>(all_rows);
  out_ = arena->take<float>(all_rows * static_cast<std::size_t>(out_stride_));
  completed_ = arena->take<std::int32_t>(static_cast<std::size_t>(pairs_));
}

DecodePart DecodeParts::of(std::int64_t pair, std::int64_t split) const {
  const std::int64_t first = (pair * splits_ + split) * rows_;
  return {maxima_ + first, sums_ + first, out_ + first * out_stride_};
}

void DecodeParts::start() const { std::fill_n(completed_, pairs_, 0); }

bool DecodeParts::complete(std::int64_t pair) const {
  // What every worker wrote of its part is visible to the one that comes last.
  return std::atomic_ref<std::int32_t>(completed_[pair]).fetch_add(1, std::memory_order_acq_rel) + 1 == splits_;
}

}  // namespace flash_dmattn::internal::cpu
