// Units of work on an executor's workers, and what they count.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/arena.h"
#include "core/problem.h"
#include "cpu/kernel_set.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/executor.h"
#include "plan/index_rows.h"
#include "plan/interval_index.h"

namespace flash_dmattn::internal::cpu {

// How many workers the call is worth, at most one a unit.
int worker_count(const AttentionProblem&, std::int64_t units, const Executor&);

// Calls run_unit(unit, worker) for every unit. Workers take units in order, so that the longest, which come first,
// start first. `kernels` says what each worker has to set up.
template <typename RunUnit>
void run_units(std::int64_t units, int workers, Executor& executor, const Kernels& kernels, RunUnit run_unit) {
  std::atomic<std::int64_t> next{0};
  const auto work = [&](int worker) {
    if (kernels.enter != nullptr) kernels.enter();
    for (std::int64_t unit = next.fetch_add(1); unit < units; unit = next.fetch_add(1)) run_unit(unit, worker);
    if (kernels.leave != nullptr) kernels.leave();
  };
  if (workers == 1) {
    work(0);
  } else {
    executor.run(workers, work);
  }
}

// Scratch memory for every worker.
class WorkerScratch {
 public:
  WorkerScratch() = default;
  WorkerScratch(int workers, std::size_t bytes, Arena* arena)
      : stride_(aligned(bytes)), memory_(arena->take<std::byte>(static_cast<std::size_t>(workers) * stride_)) {}

  void* of(int worker) const { return memory_ + static_cast<std::size_t>(worker) * stride_; }

 private:
  std::size_t stride_ = 0;
  std::byte* memory_ = nullptr;
};

// The indices of all heads, built, in IntervalIndices::bytes of `memory`.
IntervalIndices build_indices(const AttentionProblem&, void* memory, Executor&);

// The lists of all rows, packed, in IndexRows::bytes of `memory`.
IndexRows build_lists(const AttentionProblem&, void* memory, int workers, Executor&);

void add_counters(const AttentionCounters& counted, AttentionCounters* total);

// Each worker counts for itself; with 0 workers nobody does.
class WorkerCounters {
 public:
  explicit WorkerCounters(int workers) : counters_(static_cast<std::size_t>(workers)) {}

  AttentionCounters* of(int worker) {
    return counters_.empty() ? nullptr : &counters_[static_cast<std::size_t>(worker)];
  }

  // Tiles that the dense problem has and no worker visited were skipped.
  AttentionCounters sum(const AttentionProblem&, int row_tile) const;

 private:
  std::vector<AttentionCounters> counters_;
};

}  // namespace flash_dmattn::internal::cpu
