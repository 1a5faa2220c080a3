#include "cpu/workers.h"

#include "plan/bits.h"

namespace flash_dmattn::internal::cpu {
namespace {

// Multiplications below which waking another worker costs more than it saves: some 30 us of one core.
constexpr double kWorkPerWorker = 4e6;

// Upper bound of the multiplications of the larger of the call's products, masks aside.
double work_of(const AttentionProblem& problem) {
  return static_cast<double>(problem.batch * problem.heads) * static_cast<double>(problem.rows) *
         static_cast<double>(problem.keys) * static_cast<double>(std::max(problem.head_dim, problem.value_dim));
}

}  // namespace

int worker_count(const AttentionProblem& problem, std::int64_t units, const Executor& executor) {
  const auto worth = static_cast<std::int64_t>(std::min(work_of(problem) / kWorkPerWorker, 1e6)) + 1;
  const std::int64_t concurrency = std::max(executor.concurrency(), 1);
  return static_cast<int>(std::min({units, concurrency, worth}));
}

IntervalIndices build_indices(const AttentionProblem& problem, void* memory, Executor& executor) {
  const IntervalIndices indices(problem, memory);
  if (indices.size() > 0) {
    run_units(indices.size(), worker_count(problem, indices.size(), executor), executor, Kernels{},
              [&](std::int64_t position, int) { indices.build(position); });
  }
  return indices;
}

IndexRows build_lists(const AttentionProblem& problem, void* memory, int workers, Executor& executor) {
  const IndexRows lists(problem, memory);
  const int used = static_cast<int>(std::min<std::int64_t>(workers, lists.size()));
  if (used > 0) {
    run_units(lists.size(), used, executor, Kernels{}, [&](std::int64_t position, int) { lists.build(position); });
  }
  return lists;
}

void add_counters(const AttentionCounters& counted, AttentionCounters* total) {
  total->tiles_visited += counted.tiles_visited;
  total->tiles_partial += counted.tiles_partial;
  total->tiles_empty += counted.tiles_empty;
  total->kept_scores += counted.kept_scores;
  total->computed_scores += counted.computed_scores;
  total->copied_keys += counted.copied_keys;
  total->plans += counted.plans;
  total->lists += counted.lists;
  total->bitmaps += counted.bitmaps;
}

AttentionCounters WorkerCounters::sum(const AttentionProblem& problem, int row_tile) const {
  AttentionCounters sum;
  for (const AttentionCounters& one : counters_) add_counters(one, &sum);
  const std::int64_t dense_tiles =
      problem.batch * problem.heads * ((problem.rows + row_tile - 1) / row_tile) * words_for(problem.keys);
  sum.tiles_empty = dense_tiles - sum.tiles_visited;
  return sum;
}

}  // namespace flash_dmattn::internal::cpu
