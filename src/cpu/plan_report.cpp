// Plans a forward call as cpu::forward does, and counts what that would compute.
#include <vector>

#include "cpu/backend.h"
#include "cpu/config.h"
#include "cpu/decode_schedule.h"
#include "cpu/dispatch.h"
#include "cpu/schedule.h"
#include "cpu/workers.h"
#include "plan/chunk_plan.h"

namespace flash_dmattn::internal::cpu {
namespace {

// Memory of the indices (of intervals, or the lists of few rows) and of one planner for every worker.
class PlanMemory {
 public:
  PlanMemory(const AttentionProblem& problem, const ForwardSchedule& schedule, int workers)
      : PlanMemory(IntervalIndices::bytes(problem),
                   ChunkPlanner::scratch_bytes(problem, schedule.chunk_rows, kForwardRowTile), workers) {}

  PlanMemory(std::size_t index_bytes, std::size_t planner_bytes, int workers) {
    const auto arrange = [&](void* block) {
      Arena arena(block);
      indices_ = arena.take<std::byte>(index_bytes);
      planners_ = WorkerScratch(workers, planner_bytes, &arena);
      return arena.used();
    };
    lines_.resize(arrange(nullptr) / sizeof(Line));
    arrange(lines_.data());
  }

  std::size_t bytes() const { return lines_.size() * sizeof(Line); }
  void* indices() const { return indices_; }
  void* planner(int worker) const { return planners_.of(worker); }

 private:
  struct alignas(kMemoryAlignment) Line {
    std::byte bytes[kMemoryAlignment];
  };
  std::vector<Line> lines_;
  void* indices_ = nullptr;
  WorkerScratch planners_;
};

PlannedChunk write_out(const ChunkPlan& plan) {
  PlannedChunk chunk;
  chunk.row_begin = plan.row_begin;
  chunk.rows = plan.rows;
  chunk.row_tile = plan.row_tile;
  chunk.key_tile = kTileKeys;
  chunk.is_list = plan.keys != nullptr;
  chunk.has_bitmap = plan.bits != nullptr;
  for (int listed = 0; listed < plan.key_count; ++listed) {
    chunk.keys.push_back(static_cast<std::int32_t>(plan.key(listed)));
  }
  for (int row = 0; row < plan.rows; ++row) {
    for (int listed = 0; listed < plan.key_count; ++listed) {
      chunk.visible.push_back((plan.visible(row, listed / kTileKeys) >> (listed % kTileKeys)) & 1);
    }
  }
  static_assert(static_cast<int>(PlannedChunk::Tile::kPartial) == static_cast<int>(TileClass::kPartial) &&
                static_cast<int>(PlannedChunk::Tile::kFull) == static_cast<int>(TileClass::kFull));
  for (int tile = 0; tile < plan.row_tiles() * plan.key_tiles(); ++tile) {
    chunk.tiles.push_back(static_cast<PlannedChunk::Tile>(plan.classes[tile]));
  }
  return chunk;
}

// Makes the plans of all units; returns how much memory they took.
std::size_t count_plans(const AttentionProblem& problem, const ForwardSchedule& schedule, Executor& executor,
                        AttentionCounters* counters) {
  const int workers = worker_count(problem, schedule.units, executor);
  const PlanMemory memory(problem, schedule, workers);
  const IntervalIndices indices = build_indices(problem, memory.indices(), executor);
  WorkerCounters counted(workers);
  run_units(schedule.units, workers, executor, Kernels{}, [&](std::int64_t index, int worker) {
    const ForwardSchedule::Unit unit = schedule.unit(problem, index);
    ChunkPlanner planner(problem, indices, schedule.chunk_rows, kForwardRowTile, memory.planner(worker));
    const std::int64_t group = problem.group();
    for (std::int64_t head = unit.key_head_begin * group; head < unit.key_head_end * group;
         head += schedule.pass_heads) {
      const ChunkPlan& plan = planner.plan(unit.batch, head, unit.row_begin, unit.rows);
      AttentionCounters* counters_of_worker = counted.of(worker);
      count_plan(plan, schedule.pass_heads, counters_of_worker);
      count_visited_tiles(plan, schedule.pass_heads, counters_of_worker);
      counters_of_worker->copied_keys += plan.key_count;
    }
  });
  *counters = counted.sum(problem, kForwardRowTile);
  return memory.bytes();
}

// The same for calls of few rows, as cpu::decode makes them.
std::size_t count_decode_plans(const AttentionProblem& problem, const DecodeSchedule& schedule, Executor& executor,
                               AttentionCounters* counters) {
  const int workers = decode_worker_count(problem, schedule, executor.concurrency());
  const PlanMemory memory(IndexRows::bytes(problem), DecodePlans::scratch_bytes(problem, schedule), workers);
  const IndexRows lists = build_lists(problem, memory.indices(), workers, executor);
  WorkerCounters counted(workers);
  run_units(schedule.units, workers, executor, Kernels{}, [&](std::int64_t index, int worker) {
    DecodePlans plans(problem, lists, schedule, schedule.unit(problem, index), memory.planner(worker),
                      counted.of(worker));
    while (plans.next()) continue;
  });
  *counters = counted.sum(problem, kDecodeRows);
  return memory.bytes();
}

}  // namespace

void plan_report(const AttentionProblem& problem, Executor& executor, PlanReport* report) {
  const ChosenKernels chosen = choose_kernels(problem.dtype);
  report->backend = std::string("cpu/") + chosen.set->name;
  report->rule = plan_rule(problem.visibility);
  report->key_tile = kTileKeys;
  if (is_decode(problem, chosen.kernels->multiplies_pairs)) {
    const DecodeSchedule schedule = make_decode_schedule(problem);
    report->plan_bytes = count_decode_plans(problem, schedule, executor, &report->counters);
    report->chunk_rows = report->row_tile = kDecodeRows;
    report->shared_heads = schedule.pass_heads;
  } else {
    const ForwardSchedule schedule = make_forward_schedule(problem, executor.concurrency());
    report->plan_bytes = count_plans(problem, schedule, executor, &report->counters);
    report->chunk_rows = schedule.chunk_rows;
    report->row_tile = kForwardRowTile;
    report->shared_heads = schedule.pass_heads;
  }
}

// Walks over rows and visible keys, without plan or tiles: the plans serve to count what is visible.
void plan_report_fp64(const AttentionProblem& problem, Executor& executor, PlanReport* report) {
  AttentionCounters counted;
  count_plans(problem, make_forward_schedule(problem, executor.concurrency()), executor, &counted);
  report->counters = {.kept_scores = counted.kept_scores, .computed_scores = counted.kept_scores};
  report->backend = "cpu/float64";
  report->rule = "float64: every row walks over the keys that it sees";
}

void plan_chunks(const AttentionProblem& problem, Executor& executor, std::int64_t batch, std::int64_t head,
                 std::vector<PlannedChunk>* chunks) {
  const ForwardSchedule schedule = make_forward_schedule(problem, executor.concurrency());
  const PlanMemory memory(problem, schedule, 1);
  const IntervalIndices indices = build_indices(problem, memory.indices(), executor);
  ChunkPlanner planner(problem, indices, schedule.chunk_rows, kForwardRowTile, memory.planner(0));
  for (std::int64_t row = 0; row < problem.rows; row += schedule.chunk_rows) {
    const auto rows = static_cast<int>(std::min<std::int64_t>(schedule.chunk_rows, problem.rows - row));
    chunks->push_back(write_out(planner.plan(batch, head, row, rows)));
  }
}

}  // namespace flash_dmattn::internal::cpu
