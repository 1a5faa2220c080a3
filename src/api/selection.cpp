#include "flash_dmattn/selection.h"

#include "api/public_call.h"
#include "api/validate.h"
#include "api/workspace.h"
#include "cuda/backend.h"
#include "selection/select_keys.h"

namespace flash_dmattn {
namespace {

using internal::SelectionProblem;

Executor& executor_of(const SelectionContext& context) {
  return context.executor != nullptr ? *context.executor : default_executor();
}

Status selection_bytes(const SelectionProblem& problem, const SelectionContext& context, std::size_t* bytes) {
  if (context.device.is_cuda()) return internal::cuda::selection_workspace(problem, bytes);
  *bytes = internal::selection_workspace(problem, executor_of(context));
  return Status();
}

}  // namespace

Status select_keys_workspace(const SelectionInputs& inputs, const SelectionOptions& options,
                             const SelectionContext& context, std::size_t* bytes) try {
  if (Status status = internal::check_call(context.device, "bytes", bytes); !status.ok()) return status;
  SelectionProblem problem;
  Status status = internal::make_selection_problem(inputs, options, nullptr, &problem);
  return status.ok() ? selection_bytes(problem, context, bytes) : status;
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status select_keys(const SelectionInputs& inputs, const SelectionOptions& options, const KeyIntervals& intervals,
                   void* workspace, std::size_t workspace_bytes, const SelectionContext& context) try {
  if (Status status = internal::check_device(context.device); !status.ok()) return status;
  SelectionProblem problem;
  Status status = internal::make_selection_problem(inputs, options, &intervals, &problem);
  if (!status.ok()) return status;
  std::size_t needed = 0;
  status = selection_bytes(problem, context, &needed);
  if (status.ok()) status = internal::check_workspace(workspace, workspace_bytes, needed);
  if (!status.ok()) return status;
  if (context.device.is_cuda()) return internal::cuda::select_on_device(problem, workspace, context.device.stream);
  internal::select_on_host(problem, workspace, executor_of(context));
  return Status();
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

}  // namespace flash_dmattn
