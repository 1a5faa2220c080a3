#include "flash_dmattn/selection.h"

#include "api/backends.h"
#include "api/public_call.h"
#include "api/validate.h"
#include "api/workspace.h"
#include "selection/document_intervals.h"

namespace flash_dmattn {
Status select_keys_workspace(const SelectionInputs& inputs, const SelectionOptions& options,
                             const SelectionContext& context, std::size_t* bytes) try {
  if (Status status = internal::check_call(context.device, "bytes", bytes); !status.ok()) return status;
  internal::SelectionProblem problem;
  const internal::Backend* backend = nullptr;
  Status status = internal::make_selection_problem(inputs, options, nullptr, &problem);
  if (status.ok()) status = internal::find_backend(context.device, problem.dtype, &backend);
  if (!status.ok()) return status;
  return internal::measure(backend->selection_workspace, problem, internal::call_of(context), bytes);
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status select_keys(const SelectionInputs& inputs, const SelectionOptions& options, const KeyIntervals& intervals,
                   void* workspace, std::size_t workspace_bytes, const SelectionContext& context) try {
  if (Status status = internal::check_device(context.device); !status.ok()) return status;
  const internal::CallContext call = internal::call_of(context);
  internal::SelectionProblem problem;
  const internal::Backend* backend = nullptr;
  std::size_t needed = 0;
  Status status = internal::make_selection_problem(inputs, options, &intervals, &problem);
  if (status.ok()) status = internal::find_backend(context.device, problem.dtype, &backend);
  if (status.ok()) status = internal::measure(backend->selection_workspace, problem, call, &needed);
  if (status.ok()) status = internal::check_workspace(workspace, workspace_bytes, needed);
  return status.ok() ? backend->select_keys(problem, workspace, call) : status;
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status select_keys(const SelectionInputs& inputs, const SelectionOptions& options, const KeyIntervals& intervals,
                   const SelectionContext& context) try {
  if (Status status = internal::check_own_workspace(context.device); !status.ok()) return status;
  std::size_t bytes = 0;
  if (Status status = select_keys_workspace(inputs, options, context, &bytes); !status.ok()) return status;
  const internal::OwnWorkspace workspace(bytes);
  if (Status status = workspace.status(); !status.ok()) return status;
  return select_keys(inputs, options, intervals, workspace.get(), bytes, context);
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status document_intervals(const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k, std::int64_t seqlen_q,
                          bool is_causal, const KeyIntervals& intervals) try {
  internal::DocumentIntervalsProblem problem;
  Status status = internal::make_document_problem(cu_seqlens_q, cu_seqlens_k, seqlen_q, is_causal, intervals, &problem);
  if (status.ok()) internal::write_document_intervals(problem);
  return status;
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

}  // namespace flash_dmattn
