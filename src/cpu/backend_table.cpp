#include <cstring>

#include "cpu/backend.h"
#include "plan/mask_intervals.h"
#include "selection/append_kept_keys.h"
#include "selection/select_keys.h"

namespace flash_dmattn::internal::cpu {
namespace {

// Of a call's context the CPU reads the executor and the counters.
template <auto kMeasure, typename Problem>
Status query(const Problem& problem, const CallContext& call, std::size_t* bytes) {
  *bytes = kMeasure(problem, call.workers());
  return {};
}

template <auto kRun, typename Problem>
Status run(const Problem& problem, void* workspace, const CallContext& call) {
  kRun(problem, workspace, call.workers(), call.counters);
  return {};
}

template <auto kRun, typename Problem>
Status run_without_workspace(const Problem& problem, void*, const CallContext& call) {
  kRun(problem, call.workers(), call.counters);
  return {};
}

template <auto kReport>
Status report(const AttentionProblem& problem, void*, const CallContext& call, PlanReport* result) {
  kReport(problem, call.workers(), result);
  return {};
}

Status write_out_chunks(const AttentionProblem& problem, std::int64_t batch, std::int64_t head, const CallContext& call,
                        std::vector<PlannedChunk>* chunks) {
  plan_chunks(problem, call.workers(), batch, head, chunks);
  return {};
}

Status clear(void* memory, std::size_t bytes, const CallContext&) {
  std::memset(memory, 0, bytes);
  return {};
}

Status select(const SelectionProblem& problem, void* workspace, const CallContext& call) {
  select_on_host(problem, workspace, call.workers());
  return {};
}

Status append(const KeptKeysProblem& problem, const CallContext& call) {
  append_on_host(problem, call.workers());
  return {};
}

Status find_mask_intervals(const MaskIntervalsProblem& problem, void*, const CallContext& call, bool* exact) {
  *exact = find_intervals(problem, call.workers());
  return {};
}

}  // namespace

constinit const Backend kBackend = {
    .clear = clear,
    .forward_workspace = query<forward_workspace>,
    .forward = run<forward>,
    .backward_workspace = query<backward_workspace>,
    .backward = run<backward>,
    .plan_report = report<plan_report>,
    .plan_chunks = write_out_chunks,
    .selection_workspace = query<selection_workspace>,
    .select_keys = select,
    .append_kept_keys = append,
    .mask_intervals = find_mask_intervals,
};

constinit const Backend kFloat64Backend = {
    .clear = clear,
    .forward = run_without_workspace<forward_fp64>,
    .backward = run_without_workspace<backward_fp64>,
    .plan_report = report<plan_report_fp64>,
    .selection_workspace = query<selection_workspace>,
    .select_keys = select,
    .append_kept_keys = append,
    .mask_intervals = find_mask_intervals,
};

}  // namespace flash_dmattn::internal::cpu
