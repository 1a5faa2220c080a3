#include "flash_dmattn/plan.h"

#include <string>

#include "api/validate.h"
#include "cpu/backend.h"
#include "plan/mask_intervals.h"

namespace flash_dmattn {
namespace {

using internal::AttentionProblem;

template <typename Context>
Executor& executor_of(const Context& context) {
  return context.executor != nullptr ? *context.executor : default_executor();
}

Status make_planned_problem(AttentionInputs inputs, const AttentionOptions& options, AttentionProblem* problem) {
  if (!inputs.value.defined()) inputs.value = inputs.key;
  return internal::make_problem(inputs, options, problem);
}

Status check_index(const char* name, std::int64_t index, std::int64_t size) {
  if (index >= 0 && index < size) return {};
  return Status::invalid(name, "must be at least 0 and below " + std::to_string(size),
                         name + (" " + std::to_string(index)));
}

}  // namespace

Status plan_report(const AttentionInputs& inputs, const AttentionOptions& options, PlanReport* report,
                   const AttentionContext& context) {
  AttentionProblem problem;
  if (Status status = make_planned_problem(inputs, options, &problem); !status.ok()) return status;
  *report = {};
  report->backend = "cpu";
  report->rule = "nothing to compute";
  if (!problem.empty()) internal::cpu::plan_report(problem, executor_of(context), report);
  return {};
}

Status plan_chunks(const AttentionInputs& inputs, const AttentionOptions& options, std::int64_t batch,
                   std::int64_t head, std::vector<PlannedChunk>* chunks, const AttentionContext& context) {
  AttentionProblem problem;
  if (Status status = make_planned_problem(inputs, options, &problem); !status.ok()) return status;
  if (problem.dtype == DType::kFloat64) {
    return Status::invalid("query", "must not be float64, which plans nothing", "query float64");
  }
  if (Status status = check_index("batch", batch, problem.batch); !status.ok()) return status;
  if (Status status = check_index("head", head, problem.heads); !status.ok()) return status;
  chunks->clear();
  if (!problem.empty()) internal::cpu::plan_chunks(problem, executor_of(context), batch, head, chunks);
  return {};
}

Status mask_intervals(const TensorView& mask, bool is_causal, const KeyIntervals& intervals, bool* exact,
                      const SelectionContext& context) {
  internal::MaskIntervalsProblem problem;
  Status status = internal::make_mask_intervals_problem(mask, intervals, &problem);
  if (!status.ok()) return status;
  problem.is_causal = is_causal;
  *exact = internal::find_intervals(problem, executor_of(context));
  return status;
}

}  // namespace flash_dmattn
