#include "flash_dmattn/selection.h"

#include "api/validate.h"
#include "api/workspace.h"
#include "selection/select_keys.h"

namespace flash_dmattn {
namespace {

using internal::SelectionProblem;

Executor& executor_of(const SelectionContext& context) {
  return context.executor != nullptr ? *context.executor : default_executor();
}

}  // namespace

Status select_keys_workspace(const SelectionInputs& inputs, const SelectionOptions& options,
                             const SelectionContext& context, std::size_t* bytes) {
  SelectionProblem problem;
  Status status = internal::make_selection_problem(inputs, options, nullptr, &problem);
  if (status.ok()) *bytes = internal::selection_workspace(problem, executor_of(context));
  return status;
}

Status select_keys(const SelectionInputs& inputs, const SelectionOptions& options, const KeyIntervals& intervals,
                   void* workspace, std::size_t workspace_bytes, const SelectionContext& context) {
  SelectionProblem problem;
  Status status = internal::make_selection_problem(inputs, options, &intervals, &problem);
  if (!status.ok()) return status;
  Executor& executor = executor_of(context);
  const std::size_t needed = internal::selection_workspace(problem, executor);
  status = internal::check_workspace(workspace, workspace_bytes, needed);
  if (status.ok()) internal::select_on_host(problem, workspace, executor);
  return status;
}

Status select_keys(const SelectionInputs& inputs, const SelectionOptions& options, const KeyIntervals& intervals,
                   const SelectionContext& context) {
  std::size_t bytes = 0;
  if (Status status = select_keys_workspace(inputs, options, context, &bytes); !status.ok()) return status;
  const internal::OwnWorkspace workspace(bytes);
  return select_keys(inputs, options, intervals, workspace.get(), bytes, context);
}

}  // namespace flash_dmattn
