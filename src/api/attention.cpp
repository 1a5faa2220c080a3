#include "flash_dmattn/attention.h"

#include <string>

#include "api/backends.h"
#include "api/public_call.h"
#include "api/validate.h"
#include "api/workspace.h"

namespace flash_dmattn {
namespace {

using internal::AttentionProblem;
using internal::Backend;
using internal::BackwardProblem;
using internal::BroadcastView;
using internal::call_of;
using internal::CallContext;
using internal::find_backend;
using internal::ForwardProblem;
using internal::HeadView;
using internal::measure;

// Where no score is computed no key is hidden.
bool may_be_planned(const AttentionProblem& problem) { return !problem.empty() && problem.keys > 0; }

// All that can be seen of a plan without waiting for it.
Status check_plan(const Backend& backend, const AttentionProblem& problem, const CallContext& call) {
  const AttentionPlan& plan = problem.visibility.plan;
  if (plan.data == nullptr || !may_be_planned(problem)) return {};
  std::size_t needed = 0;
  const Status status = measure(backend.attention_plan_bytes, problem, call, &needed);
  if (!status.ok() || needed == 0 || needed == plan.bytes) return status;
  return Status::invalid("plan", "must have the " + std::to_string(needed) + " bytes of a plan for this call",
                         "plan of " + std::to_string(plan.bytes) + " bytes");
}

// Finds the backend and asks it whether it takes the problem.
Status choose_backend(const AttentionProblem& problem, const AttentionContext& context, const Backend** backend) {
  Status status = find_backend(context.device, problem.dtype, backend);
  if (status.ok()) status = check_plan(**backend, problem, call_of(context));
  return status.ok() && (*backend)->check != nullptr ? (*backend)->check(problem) : status;
}

// Zeroes what a contiguous tensor of so many elements holds.
Status clear(const Backend& backend, void* data, std::int64_t elements, DType dtype, const CallContext& call) {
  const std::size_t bytes = static_cast<std::size_t>(elements) * size_of(dtype);
  return data == nullptr || bytes == 0 ? Status() : backend.clear(data, bytes, call);
}

// Without a query row every gradient that is asked for is zero, and that of the queries has no elements.
Status clear_gradients(const Backend& backend, const BackwardProblem& problem, const CallContext& call) {
  const std::int64_t key_rows = problem.batch * problem.keys * problem.key_heads;
  const BroadcastView& dbias = problem.dbias;
  const HeadView& dsink = problem.dsink;
  Status status = clear(backend, problem.dkey.data, key_rows * problem.head_dim, problem.dtype, call);
  if (status.ok()) status = clear(backend, problem.dvalue.data, key_rows * problem.value_dim, problem.dtype, call);
  if (status.ok()) status = clear(backend, dsink.data, problem.heads, dsink.dtype, call);
  if (!status.ok()) return status;
  return clear(backend, dbias.data, dbias.batches * dbias.heads * dbias.rows * dbias.keys, dbias.dtype, call);
}

}  // namespace

Status attention_plan_bytes(const AttentionInputs& inputs, const AttentionOptions& options,
                            const AttentionContext& context, std::size_t* bytes) try {
  if (Status status = internal::check_call(context.device, "bytes", bytes); !status.ok()) return status;
  AttentionProblem problem;
  if (Status status = internal::make_planned_problem(inputs, options, &problem); !status.ok()) return status;
  *bytes = 0;
  if (!may_be_planned(problem)) return {};
  const Backend* backend = nullptr;
  const Status status = find_backend(context.device, problem.dtype, &backend);
  return status.ok() ? measure(backend->attention_plan_bytes, problem, call_of(context), bytes) : status;
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status attention_plan_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                const AttentionContext& context, std::size_t* bytes) try {
  if (Status status = internal::check_call(context.device, "bytes", bytes); !status.ok()) return status;
  AttentionProblem problem;
  if (Status status = internal::make_planned_problem(inputs, options, &problem); !status.ok()) return status;
  *bytes = 0;
  if (!may_be_planned(problem)) return {};
  const Backend* backend = nullptr;
  const Status status = find_backend(context.device, problem.dtype, &backend);
  return status.ok() ? measure(backend->attention_plan_workspace, problem, call_of(context), bytes) : status;
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status make_attention_plan(const AttentionInputs& inputs, const AttentionOptions& options, void* plan,
                           std::size_t bytes, void* workspace, std::size_t workspace_bytes,
                           const AttentionContext& context) try {
  if (Status status = internal::check_device(context.device); !status.ok()) return status;
  AttentionProblem problem;
  if (Status status = internal::make_planned_problem(inputs, options, &problem); !status.ok()) return status;
  problem.visibility.plan = {};
  if (!may_be_planned(problem)) return {};
  const CallContext call = call_of(context);
  const Backend* backend = nullptr;
  std::size_t needed = 0, needed_workspace = 0;
  Status status = find_backend(context.device, problem.dtype, &backend);
  if (status.ok()) status = measure(backend->attention_plan_bytes, problem, call, &needed);
  if (!status.ok() || needed == 0) return status;
  status = internal::check_memory("plan", plan, bytes, needed);
  if (status.ok()) status = measure(backend->attention_plan_workspace, problem, call, &needed_workspace);
  if (status.ok()) status = internal::check_workspace(workspace, workspace_bytes, needed_workspace);
  return status.ok() ? backend->make_attention_plan(problem, plan, workspace, call) : status;
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status attention_forward_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                   const AttentionContext& context, std::size_t* bytes) try {
  if (Status status = internal::check_call(context.device, "bytes", bytes); !status.ok()) return status;
  AttentionProblem problem;
  if (Status status = internal::make_problem(inputs, options, &problem); !status.ok()) return status;
  *bytes = 0;
  if (problem.empty()) return {};
  const Backend* backend = nullptr;
  const Status status = choose_backend(problem, context, &backend);
  return status.ok() ? measure(backend->forward_workspace, problem, call_of(context), bytes) : status;
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status attention_backward_workspace(const AttentionInputs& inputs, const AttentionCotangents& cotangents,
                                    const AttentionOptions& options, const AttentionGradients& gradients,
                                    const AttentionContext& context, std::size_t* bytes) try {
  if (Status status = internal::check_call(context.device, "bytes", bytes); !status.ok()) return status;
  BackwardProblem problem;
  Status status = internal::make_backward_problem(inputs, cotangents, options, gradients, &problem);
  if (!status.ok()) return status;
  *bytes = 0;
  const Backend* backend = nullptr;
  status = choose_backend(problem, context, &backend);
  if (!status.ok() || problem.empty()) return status;
  return measure(backend->backward_workspace, problem, call_of(context), bytes);
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                         const AttentionOutputs& outputs, void* workspace, std::size_t workspace_bytes,
                         const AttentionContext& context) try {
  if (Status status = internal::check_device(context.device); !status.ok()) return status;
  ForwardProblem problem;
  if (Status status = internal::make_forward_problem(inputs, options, outputs, &problem); !status.ok()) return status;
  if (problem.empty()) return {};
  const CallContext call = call_of(context);
  const Backend* backend = nullptr;
  std::size_t needed = 0;
  Status status = choose_backend(problem, context, &backend);
  if (status.ok()) status = measure(backend->forward_workspace, problem, call, &needed);
  if (status.ok()) status = internal::check_workspace(workspace, workspace_bytes, needed);
  return status.ok() ? backend->forward(problem, workspace, call) : status;
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status attention_backward(const AttentionInputs& inputs, const AttentionCotangents& cotangents,
                          const AttentionOptions& options, const AttentionGradients& gradients, void* workspace,
                          std::size_t workspace_bytes, const AttentionContext& context) try {
  if (Status status = internal::check_device(context.device); !status.ok()) return status;
  BackwardProblem problem;
  Status status = internal::make_backward_problem(inputs, cotangents, options, gradients, &problem);
  if (!status.ok()) return status;
  const CallContext call = call_of(context);
  const Backend* backend = nullptr;
  std::size_t needed = 0;
  status = choose_backend(problem, context, &backend);
  if (status.ok() && problem.empty()) return clear_gradients(*backend, problem, call);
  if (status.ok()) status = measure(backend->backward_workspace, problem, call, &needed);
  if (status.ok()) status = internal::check_workspace(workspace, workspace_bytes, needed);
  return status.ok() ? backend->backward(problem, workspace, call) : status;
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                         const AttentionOutputs& outputs, const AttentionContext& context) try {
  if (Status status = internal::check_own_workspace(context.device); !status.ok()) return status;
  std::size_t bytes = 0;
  if (Status status = attention_forward_workspace(inputs, options, context, &bytes); !status.ok()) return status;
  const internal::OwnWorkspace workspace(bytes);
  if (Status status = workspace.status(); !status.ok()) return status;
  return attention_forward(inputs, options, outputs, workspace.get(), bytes, context);
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status attention_backward(const AttentionInputs& inputs, const AttentionCotangents& cotangents,
                          const AttentionOptions& options, const AttentionGradients& gradients,
                          const AttentionContext& context) try {
  if (Status status = internal::check_own_workspace(context.device); !status.ok()) return status;
  std::size_t bytes = 0;
  Status status = attention_backward_workspace(inputs, cotangents, options, gradients, context, &bytes);
  if (!status.ok()) return status;
  const internal::OwnWorkspace workspace(bytes);
  if (Status status = workspace.status(); !status.ok()) return status;
  return attention_backward(inputs, cotangents, options, gradients, workspace.get(), bytes, context);
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

}  // namespace flash_dmattn
