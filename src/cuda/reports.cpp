// What answers on the host, and so waits for the device: reports of plans, and the intervals of dense masks.
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/arena.h"
#include "cuda/backend.h"
#include "cuda/device_kernels.h"
#include "cuda/kernel_family.h"
#include "cuda/plan/device_mask_intervals.h"
#include "cuda/plan/make_plan.h"
#include "cuda/plan/prepared_visibility.h"
#include "cuda/status_of.h"

namespace flash_dmattn::internal::cuda {
namespace {

// A plan, also where a call would do without, and what it counts to.
struct ReportScratch {
  PreparedVisibility prepared;
  std::size_t bytes = 0;  // of the plan and what making it needs
  PlanCounts* counts = nullptr;

  void arrange(const AttentionProblem& problem, Arena* arena) {
    prepared.arrange_plan(problem, arena);
    prepared.arrange_staging(problem, arena);
    bytes = arena->used();
    counts = arena->take<PlanCounts>(1);
  }
};

// A report is of shapes: tokens count as contiguous.
AttentionProblem with_contiguous_tokens(AttentionProblem problem) {
  const auto set = [&](TokenView* tokens, std::int64_t count, std::int64_t heads, std::int64_t columns) {
    *tokens = {nullptr, count * heads * columns, heads * columns, columns};
  };
  set(&problem.query, problem.rows, problem.heads, problem.head_dim);
  set(&problem.key, problem.keys, problem.key_heads, problem.head_dim);
  set(&problem.value, problem.keys, problem.key_heads, problem.value_dim);
  return problem;
}

// Device counts are summed over query heads and batch elements, the report's plans are those that exist.
void fill_report(const AttentionProblem& problem, const PreparedVisibility& prepared, const PlanCounts& counts,
                 PlanReport* report) {
  const DevicePlan& plan = prepared.plan;
  const std::int64_t tiles = problem.batch * problem.heads * ((problem.rows + kUnitRows - 1) / kUnitRows) *
                             ((problem.keys + kPlanTileKeys - 1) / kPlanTileKeys);
  const std::int64_t plans = (plan.per_batch ? problem.batch : 1) * plan.plan_heads * plan.chunk_count;
  const std::int64_t users = plans == 0 ? 1 : problem.batch * problem.heads * plan.chunk_count / plans;
  const bool by_row = prepared.visibility.packed.defined() || prepared.visibility.begin.defined();
  report->counters = {.tiles_visited = counts.tiles_visited,
                      .tiles_partial = counts.tiles_partial,
                      .tiles_empty = tiles - counts.tiles_visited,
                      .kept_scores = counts.kept_scores,
                      .computed_scores = counts.computed_scores,
                      .copied_keys = counts.listed_keys / users,
                      .plans = plans,
                      .lists = counts.list_chunks / users,
                      .bitmaps = by_row ? plans : 0};
  report->backend = std::string("cuda/") + forward_family(with_contiguous_tokens(problem), current_gpu()).name;
  report->rule = is_planned(problem) ? "a chunk of rows lists its keys unless nearly all neighbours are seen"
                                     : "the causal rule and lengths alone: tiles by arithmetic, no plan";
  report->chunk_rows = kChunkRows;
  report->row_tile = kUnitRows;
  report->key_tile = kPlanTileKeys;
  report->shared_heads = static_cast<int>(plan.head_divisor);
}

}  // namespace

Status plan_report_workspace(const AttentionProblem& problem, std::size_t* bytes) {
  Arena arena(nullptr);
  ReportScratch().arrange(problem, &arena);
  *bytes = arena.used();
  return {};
}

Status plan_report(const AttentionProblem& problem, void* workspace, void* stream_handle, PlanReport* report) {
  auto* stream = static_cast<cudaStream_t>(stream_handle);
  Launches launches;
  Arena arena(workspace);
  ReportScratch scratch;
  scratch.arrange(problem, &arena);
  PreparedVisibility& prepared = scratch.prepared;
  prepared.write(problem, &launches, stream);
  report->plan_bytes = is_planned(problem) ? scratch.bytes : 0;
  PlanCounts counts = {};
  launches
      .then([&] {
        return count_plan(prepared.visibility, prepared.plan, problem.batch, problem.heads, scratch.counts, stream);
      })
      .then([&] { return cudaMemcpyAsync(&counts, scratch.counts, sizeof counts, cudaMemcpyDeviceToHost, stream); })
      .then([&] { return cudaStreamSynchronize(stream); });
  fill_report(problem, prepared, counts, report);
  return launches.status();
}

Status mask_intervals_workspace(const MaskIntervalsProblem& problem, std::size_t* bytes) {
  *bytes = mask_intervals_bytes(problem);
  if (!mask_intervals_fit(problem)) {
    return Status::invalid("mask", "must be one that fewer than 2^31 blocks of 240 rows and 512 keys cover on CUDA",
                           "B " + std::to_string(problem.batch) + ", heads " + std::to_string(problem.heads) + ", Sq " +
                               std::to_string(problem.rows) + ", Sk " + std::to_string(problem.keys));
  }
  return check_current_device();
}

Status find_intervals_on_device(const MaskIntervalsProblem& problem, void* workspace, void* stream_handle,
                                bool* exact) {
  auto* stream = static_cast<cudaStream_t>(stream_handle);
  const int* device_inexact = nullptr;
  int inexact = 0;
  const Status status =
      Launches()
          .then([&] { return mask_intervals(problem, workspace, &device_inexact, stream); })
          .then(
              [&] { return cudaMemcpyAsync(&inexact, device_inexact, sizeof inexact, cudaMemcpyDeviceToHost, stream); })
          .then([&] { return cudaStreamSynchronize(stream); })
          .status();
  *exact = inexact == 0;
  return status;
}

}  // namespace flash_dmattn::internal::cuda
