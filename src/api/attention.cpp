#include "flash_dmattn/attention.h"

#include <string>

#include "api/public_call.h"
#include "api/validate.h"
#include "api/workspace.h"
#include "cpu/backend.h"
#include "cuda/backend.h"

namespace flash_dmattn {
namespace {

using internal::AttentionProblem;
using internal::BackwardProblem;
using internal::ForwardProblem;

Executor& executor_of(const AttentionContext& context) {
  return context.executor != nullptr ? *context.executor : default_executor();
}

bool may_be_planned(const AttentionProblem& problem, const AttentionContext& context) {
  return context.device.is_cuda() && !problem.empty() && problem.keys > 0;
}

Status plan_bytes(const AttentionProblem& problem, const AttentionContext& context, std::size_t* bytes) {
  *bytes = 0;
  return may_be_planned(problem, context) ? internal::cuda::attention_plan_bytes(problem, bytes) : Status();
}

// All that can be seen of a plan without waiting for it.
Status check_plan(const AttentionProblem& problem, const AttentionContext& context) {
  if (problem.plan == nullptr) return Status();
  std::size_t needed = 0;
  const Status status = plan_bytes(problem, context, &needed);
  if (!status.ok() || needed == 0 || needed == problem.plan_bytes) return status;
  return Status::invalid("plan", "must have the " + std::to_string(needed) + " bytes of a plan for this call",
                         "plan of " + std::to_string(problem.plan_bytes) + " bytes");
}

Status forward_bytes(const AttentionProblem& problem, const AttentionContext& context, std::size_t* bytes) {
  *bytes = 0;
  if (problem.empty()) return Status();
  if (Status status = check_plan(problem, context); !status.ok()) return status;
  if (context.device.is_cuda()) return internal::cuda::forward_workspace(problem, bytes);
  if (problem.dtype != DType::kFloat64) *bytes = internal::cpu::forward_workspace(problem, executor_of(context));
  return Status();
}

// No query row: every gradient that is asked for is zero, and there is nothing to walk over.
Status backward_bytes(const BackwardProblem& problem, const AttentionContext& context, std::size_t* bytes) {
  *bytes = 0;
  if (Status status = check_plan(problem, context); !status.ok()) return status;
  if (context.device.is_cuda()) return internal::cuda::backward_workspace(problem, bytes);
  if (problem.empty()) return Status();
  if (problem.dtype != DType::kFloat64) *bytes = internal::cpu::backward_workspace(problem, executor_of(context));
  return Status();
}

// Zeroes a contiguous (B, S, heads, D) tensor.
void clear(const internal::TokenView& view, std::int64_t elements, DType dtype) {
  if (view.defined()) __builtin_memset(view.data, 0, static_cast<std::size_t>(elements) * size_of(dtype));
}

void clear_gradients(const BackwardProblem& problem) {
  clear(problem.dquery, problem.batch * problem.rows * problem.heads * problem.head_dim, problem.dtype);
  clear(problem.dkey, problem.batch * problem.keys * problem.key_heads * problem.head_dim, problem.dtype);
  clear(problem.dvalue, problem.batch * problem.keys * problem.key_heads * problem.head_dim, problem.dtype);
  const internal::BroadcastView& dbias = problem.dbias;
  clear({dbias.data}, dbias.batches * dbias.heads * dbias.rows * dbias.keys, dbias.dtype);
}

}  // namespace

Status attention_plan_bytes(const AttentionInputs& inputs, const AttentionOptions& options,
                            const AttentionContext& context, std::size_t* bytes) try {
  if (Status status = internal::check_call(context.device, "bytes", bytes); !status.ok()) return status;
  AttentionProblem problem;
  Status status = internal::make_planned_problem(inputs, options, &problem);
  return status.ok() ? plan_bytes(problem, context, bytes) : status;
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status attention_plan_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                const AttentionContext& context, std::size_t* bytes) try {
  if (Status status = internal::check_call(context.device, "bytes", bytes); !status.ok()) return status;
  AttentionProblem problem;
  if (Status status = internal::make_planned_problem(inputs, options, &problem); !status.ok()) return status;
  *bytes = 0;
  return may_be_planned(problem, context) ? internal::cuda::attention_plan_workspace(problem, bytes) : Status();
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status make_attention_plan(const AttentionInputs& inputs, const AttentionOptions& options, void* plan,
                           std::size_t bytes, void* workspace, std::size_t workspace_bytes,
                           const AttentionContext& context) try {
  if (Status status = internal::check_device(context.device); !status.ok()) return status;
  AttentionProblem problem;
  if (Status status = internal::make_planned_problem(inputs, options, &problem); !status.ok()) return status;
  problem.plan = nullptr;
  std::size_t needed = 0, needed_workspace = 0;
  Status status = plan_bytes(problem, context, &needed);
  if (!status.ok() || needed == 0) return status;
  status = internal::check_memory("plan", plan, bytes, needed);
  if (status.ok()) status = internal::cuda::attention_plan_workspace(problem, &needed_workspace);
  if (status.ok()) status = internal::check_workspace(workspace, workspace_bytes, needed_workspace);
  if (!status.ok()) return status;
  return internal::cuda::make_attention_plan(problem, plan, workspace, context.device.stream);
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status attention_forward_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                   const AttentionContext& context, std::size_t* bytes) try {
  if (Status status = internal::check_call(context.device, "bytes", bytes); !status.ok()) return status;
  AttentionProblem problem;
  Status status = internal::make_problem(inputs, options, &problem);
  return status.ok() ? forward_bytes(problem, context, bytes) : status;
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status attention_backward_workspace(const AttentionInputs& inputs, const AttentionCotangents& cotangents,
                                    const AttentionOptions& options, const AttentionGradients& gradients,
                                    const AttentionContext& context, std::size_t* bytes) try {
  if (Status status = internal::check_call(context.device, "bytes", bytes); !status.ok()) return status;
  BackwardProblem problem;
  Status status = internal::make_backward_problem(inputs, cotangents, options, gradients, &problem);
  return status.ok() ? backward_bytes(problem, context, bytes) : status;
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                         const AttentionOutputs& outputs, void* workspace, std::size_t workspace_bytes,
                         const AttentionContext& context) try {
  if (Status status = internal::check_device(context.device); !status.ok()) return status;
  ForwardProblem problem;
  if (Status status = internal::make_forward_problem(inputs, options, outputs, &problem); !status.ok()) return status;
  if (problem.empty()) return Status();
  std::size_t needed = 0;
  Status status = forward_bytes(problem, context, &needed);
  if (status.ok()) status = internal::check_workspace(workspace, workspace_bytes, needed);
  if (!status.ok()) return status;
  if (context.device.is_cuda()) return internal::cuda::forward(problem, workspace, context.device.stream);
  if (problem.dtype == DType::kFloat64) {
    internal::cpu::forward_fp64(problem, executor_of(context), context.counters);
  } else {
    internal::cpu::forward(problem, workspace, executor_of(context), context.counters);
  }
  return Status();
} catch (const std::exception& error) {
  return internal::status_of_exception(error);
}

Status attention_backward(const AttentionInputs& inputs, const AttentionCotangents& cotangents,
                          const AttentionOptions& options, const AttentionGradients& gradients, void* workspace,
                          std::size_t workspace_bytes, const AttentionContext& context) try {
  if (Status status = internal::check_device(context.device); !status.ok()) return status;
  BackwardProblem problem;
  if (Status status = internal::make_backward_problem(inputs, cotangents, options, gradients, &problem); !status.ok()) {
    return status;
  }
  std::size_t needed = 0;
  Status status = backward_bytes(problem, context, &needed);
  if (status.ok()) status = internal::check_workspace(workspace, workspace_bytes, needed);
  if (!status.ok()) return status;
  if (context.device.is_cuda()) return internal::cuda::backward(problem, workspace, context.device.stream);
  if (problem.empty()) {
    clear_gradients(problem);
  } else if (problem.dtype == DType::kFloat64) {
    internal::cpu::backward_fp64(problem, executor_of(context), context.counters);
  } else {
    internal::cpu::backward(problem, workspace, executor_of(context), context.counters);
  }
  return Status();
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
