#include "flash_dmattn/plan.h"

#include <string>
#include <utility>
#include <vector>

#include "api/backends.h"
#include "api/public_call.h"
#include "api/validate.h"
#include "api/workspace.h"

namespace flash_dmattn {
namespace {

using internal::AttentionProblem;
using internal::Backend;
using internal::call_of;
using internal::CallContext;
using internal::find_backend;
using internal::make_planned_problem;
using internal::MaskIntervalsProblem;
using internal::measure;

// The backend of a report and the memory that it needs.
Status prepare_report(const AttentionProblem& problem, const AttentionContext& context, const Backend** backend,
                      std::size_t* bytes) {
  Status status = find_backend(context.device, problem.dtype, backend);
  if (status.ok() && (*backend)->check != nullptr) status = (*backend)->check(problem);
  return status.ok() ? measure((*backend)->plan_report_workspace, problem, call_of(context), bytes) : status;
}

// The same for the intervals of a mask.
Status prepare_intervals(const MaskIntervalsProblem& problem, const SelectionContext& context, const Backend** backend,
                         std::size_t* bytes) {
  const Status status = find_backend(context.device, DType::kBool, backend);
  return status.ok() ? measure((*backend)->mask_intervals_workspace, problem, call_of(context), bytes) : status;
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
  const Backend* backend = nullptr;
  return problem.empty() ? Status() : prepare_report(problem, context, &backend, bytes);
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status plan_report(const AttentionInputs& inputs, const AttentionOptions& options, PlanReport* report, void* workspace,
                   std::size_t workspace_bytes, const AttentionContext& context) try {
  if (Status status = internal::check_call(context.device, "report", report); !status.ok()) return status;
  AttentionProblem problem;
  if (Status status = make_planned_problem(inputs, options, &problem); !status.ok()) return status;
  if (problem.empty()) {
    *report = {};
    report->backend = internal::name_of(context.device.kind);
    report->rule = "nothing to compute";
    return {};
  }
  const Backend* backend = nullptr;
  std::size_t needed = 0;
  Status status = prepare_report(problem, context, &backend, &needed);
  if (status.ok()) status = internal::check_workspace(workspace, workspace_bytes, needed);
  if (!status.ok()) return status;
  *report = {};
  return backend->plan_report(problem, workspace, call_of(context), report);
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
  if (!problem.empty()) {
    const Backend* backend = nullptr;
    Status status = find_backend(context.device, problem.dtype, &backend);
    if (status.ok()) status = backend->plan_chunks(problem, batch, head, call_of(context), &planned);
    if (!status.ok()) return status;
  }
  *chunks = std::move(planned);
  return {};
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status mask_intervals_workspace(const TensorView& mask, const KeyIntervals& intervals, const SelectionContext& context,
                                std::size_t* bytes) try {
  if (Status status = internal::check_call(context.device, "bytes", bytes); !status.ok()) return status;
  MaskIntervalsProblem problem;
  const Backend* backend = nullptr;
  const KeyIntervals* given = intervals.defined() ? &intervals : nullptr;
  const Status status = internal::make_mask_intervals_problem(mask, given, &problem);
  *bytes = 0;
  return status.ok() ? prepare_intervals(problem, context, &backend, bytes) : status;
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status mask_intervals(const TensorView& mask, bool is_causal, const KeyIntervals& intervals, bool* exact,
                      void* workspace, std::size_t workspace_bytes, const SelectionContext& context) try {
  if (Status status = internal::check_call(context.device, "exact", exact); !status.ok()) return status;
  MaskIntervalsProblem problem;
  const Backend* backend = nullptr;
  std::size_t needed = 0;
  Status status = internal::make_mask_intervals_problem(mask, &intervals, &problem);
  problem.is_causal = is_causal;
  if (status.ok()) status = prepare_intervals(problem, context, &backend, &needed);
  if (status.ok()) status = internal::check_workspace(workspace, workspace_bytes, needed);
  return status.ok() ? backend->mask_intervals(problem, workspace, call_of(context), exact) : status;
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
