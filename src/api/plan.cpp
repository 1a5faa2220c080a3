#include "flash_dmattn/plan.h"

#include <string>
#include <utility>
#include <vector>

#include "api/public_call.h"
#include "api/validate.h"
#include "api/workspace.h"
#include "cpu/backend.h"
#include "cuda/backend.h"
#include "plan/mask_intervals.h"

namespace flash_dmattn {
namespace {

using internal::AttentionProblem;
using internal::make_planned_problem;

template <typename Context>
Executor& executor_of(const Context& context) {
  return context.executor != nullptr ? *context.executor : default_executor();
}

Status check_index(const char* name, std::int64_t index, std::int64_t size) {
  if (index >= 0 && index < size) return {};
  return Status::invalid(name, "must be at least 0 and below " + std::to_string(size),
                         name + (" " + std::to_string(index)));
}

}  // namespace

Status plan_report_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                             const AttentionContext& context, std::size_t* bytes) try {
  if (Status status = internal::check_call(context.device, "bytes", bytes); !status.ok()) return status;
  AttentionProblem problem;
  if (Status status = make_planned_problem(inputs, options, &problem); !status.ok()) return status;
  *bytes = 0;
  if (!context.device.is_cuda() || problem.empty()) return {};
  return internal::cuda::plan_report_workspace(problem, bytes);
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status plan_report(const AttentionInputs& inputs, const AttentionOptions& options, PlanReport* report, void* workspace,
                   std::size_t workspace_bytes, const AttentionContext& context) try {
  if (Status status = internal::check_call(context.device, "report", report); !status.ok()) return status;
  std::size_t needed = 0;
  Status status = plan_report_workspace(inputs, options, context, &needed);
  if (status.ok()) status = internal::check_workspace(workspace, workspace_bytes, needed);
  AttentionProblem problem;
  if (status.ok()) status = make_planned_problem(inputs, options, &problem);
  if (!status.ok()) return status;
  *report = {};
  report->backend = context.device.is_cuda() ? "cuda" : "cpu";
  report->rule = "nothing to compute";
  if (problem.empty()) return {};
  if (context.device.is_cuda()) return internal::cuda::plan_report(problem, workspace, context.device.stream, report);
  internal::cpu::plan_report(problem, executor_of(context), report);
  return {};
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status plan_report(const AttentionInputs& inputs, const AttentionOptions& options, PlanReport* report,
                   const AttentionContext& context) try {
  if (Status status = internal::check_own_workspace(context.device); !status.ok()) return status;
  return plan_report(inputs, options, report, nullptr, 0, context);
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status plan_chunks(const AttentionInputs& inputs, const AttentionOptions& options, std::int64_t batch,
                   std::int64_t head, std::vector<PlannedChunk>* chunks, const AttentionContext& context) try {
  if (Status status = internal::check_call(context.device, "chunks", chunks); !status.ok()) return status;
  if (context.device.is_cuda()) return Status::invalid("query", "must be on the CPU to be written out", "cuda");
  AttentionProblem problem;
  if (Status status = make_planned_problem(inputs, options, &problem); !status.ok()) return status;
  if (problem.dtype == DType::kFloat64) {
    return Status::invalid("query", "must not be float64, which plans nothing", "query float64");
  }
  if (Status status = check_index("batch", batch, problem.batch); !status.ok()) return status;
  if (Status status = check_index("head", head, problem.heads); !status.ok()) return status;
  std::vector<PlannedChunk> planned;
  if (!problem.empty()) internal::cpu::plan_chunks(problem, executor_of(context), batch, head, &planned);
  *chunks = std::move(planned);
  return {};
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status mask_intervals_workspace(const TensorView& mask, const KeyIntervals& intervals, const SelectionContext& context,
                                std::size_t* bytes) try {
  if (Status status = internal::check_call(context.device, "bytes", bytes); !status.ok()) return status;
  internal::MaskIntervalsProblem problem;
  const KeyIntervals* given = intervals.defined() ? &intervals : nullptr;
  Status status = internal::make_mask_intervals_problem(mask, given, &problem);
  *bytes = 0;
  if (status.ok() && context.device.is_cuda()) status = internal::cuda::mask_intervals_workspace(problem, bytes);
  return status;
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status mask_intervals(const TensorView& mask, bool is_causal, const KeyIntervals& intervals, bool* exact,
                      void* workspace, std::size_t workspace_bytes, const SelectionContext& context) try {
  if (Status status = internal::check_call(context.device, "exact", exact); !status.ok()) return status;
  std::size_t needed = 0;
  Status status = mask_intervals_workspace(mask, intervals, context, &needed);
  if (status.ok()) status = internal::check_workspace(workspace, workspace_bytes, needed);
  internal::MaskIntervalsProblem problem;
  if (status.ok()) status = internal::make_mask_intervals_problem(mask, &intervals, &problem);
  if (!status.ok()) return status;
  problem.is_causal = is_causal;
  if (context.device.is_cuda()) {
    return internal::cuda::find_intervals_on_device(problem, workspace, context.device.stream, exact);
  }
  *exact = internal::find_intervals(problem, executor_of(context));
  return {};
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status mask_intervals(const TensorView& mask, bool is_causal, const KeyIntervals& intervals, bool* exact,
                      const SelectionContext& context) try {
  if (Status status = internal::check_own_workspace(context.device); !status.ok()) return status;
  return mask_intervals(mask, is_causal, intervals, exact, nullptr, 0, context);
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

}  // namespace flash_dmattn
