#include "flash_dmattn/attention.h"

#include "api/validate.h"
#include "api/workspace.h"
#include "cpu/backend.h"

namespace flash_dmattn {
namespace {

using internal::AttentionProblem;
using internal::BackwardProblem;
using internal::ForwardProblem;

Executor& executor_of(const AttentionContext& context) {
  return context.executor != nullptr ? *context.executor : default_executor();
}

std::size_t forward_bytes(const AttentionProblem& problem, const Executor& executor) {
  if (problem.empty() || problem.dtype == DType::kFloat64) return 0;
  return internal::cpu::forward_workspace(problem, executor);
}

// No query row: every gradient that is asked for is zero, and there is nothing to walk over.
std::size_t backward_bytes(const BackwardProblem& problem, const Executor& executor) {
  if (problem.empty() || problem.dtype == DType::kFloat64) return 0;
  return internal::cpu::backward_workspace(problem, executor);
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

Status attention_forward_workspace(const AttentionInputs& inputs, const AttentionOptions& options,
                                   const AttentionContext& context, std::size_t* bytes) {
  AttentionProblem problem;
  Status status = internal::make_problem(inputs, options, &problem);
  if (status.ok()) *bytes = forward_bytes(problem, executor_of(context));
  return status;
}

Status attention_backward_workspace(const AttentionInputs& inputs, const AttentionCotangents& cotangents,
                                    const AttentionOptions& options, const AttentionGradients& gradients,
                                    const AttentionContext& context, std::size_t* bytes) {
  BackwardProblem problem;
  Status status = internal::make_backward_problem(inputs, cotangents, options, gradients, &problem);
  if (status.ok()) *bytes = backward_bytes(problem, executor_of(context));
  return status;
}

Status attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                         const AttentionOutputs& outputs, void* workspace, std::size_t workspace_bytes,
                         const AttentionContext& context) {
  ForwardProblem problem;
  if (Status status = internal::make_forward_problem(inputs, options, outputs, &problem); !status.ok()) return status;
  if (problem.empty()) return Status();
  Executor& executor = executor_of(context);
  if (problem.dtype == DType::kFloat64) {
    internal::cpu::forward_fp64(problem, executor, context.counters);
    return Status();
  }
  Status status = internal::check_workspace(workspace, workspace_bytes, forward_bytes(problem, executor));
  if (status.ok()) internal::cpu::forward(problem, workspace, executor, context.counters);
  return status;
}

Status attention_backward(const AttentionInputs& inputs, const AttentionCotangents& cotangents,
                          const AttentionOptions& options, const AttentionGradients& gradients, void* workspace,
                          std::size_t workspace_bytes, const AttentionContext& context) {
  BackwardProblem problem;
  if (Status status = internal::make_backward_problem(inputs, cotangents, options, gradients, &problem); !status.ok()) {
    return status;
  }
  if (problem.empty()) {
    clear_gradients(problem);
    return Status();
  }
  Executor& executor = executor_of(context);
  if (problem.dtype == DType::kFloat64) {
    internal::cpu::backward_fp64(problem, executor, context.counters);
    return Status();
  }
  Status status = internal::check_workspace(workspace, workspace_bytes, backward_bytes(problem, executor));
  if (status.ok()) internal::cpu::backward(problem, workspace, executor, context.counters);
  return status;
}

Status attention_forward(const AttentionInputs& inputs, const AttentionOptions& options,
                         const AttentionOutputs& outputs, const AttentionContext& context) {
  std::size_t bytes = 0;
  if (Status status = attention_forward_workspace(inputs, options, context, &bytes); !status.ok()) return status;
  const internal::OwnWorkspace workspace(bytes);
  return attention_forward(inputs, options, outputs, workspace.get(), bytes, context);
}

Status attention_backward(const AttentionInputs& inputs, const AttentionCotangents& cotangents,
                          const AttentionOptions& options, const AttentionGradients& gradients,
                          const AttentionContext& context) {
  std::size_t bytes = 0;
  Status status = attention_backward_workspace(inputs, cotangents, options, gradients, context, &bytes);
  if (!status.ok()) return status;
  const internal::OwnWorkspace workspace(bytes);
  return attention_backward(inputs, cotangents, options, gradients, workspace.get(), bytes, context);
}

}  // namespace flash_dmattn
