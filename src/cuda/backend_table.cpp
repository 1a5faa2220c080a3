#include <cuda_runtime_api.h>

#include "cuda/backend.h"
#include "cuda/plan/prepared_visibility.h"
#include "cuda/status_of.h"

namespace flash_dmattn::internal::cuda {
namespace {

// Of a call's context CUDA reads the stream, and to measure memory nothing.
template <auto kQuery, typename Problem>
Status query(const Problem& problem, const CallContext&, std::size_t* bytes) {
  return kQuery(problem, bytes);
}

template <auto kEnqueue, typename Problem, typename... Result>
Status enqueue(const Problem& problem, void* workspace, const CallContext& call, Result*... result) {
  return kEnqueue(problem, workspace, call.stream, result...);
}

Status enqueue_clear(void* memory, std::size_t bytes, const CallContext& call) {
  return status_of(cudaMemsetAsync(memory, 0, bytes, static_cast<cudaStream_t>(call.stream)));
}

Status enqueue_appending(const KeptKeysProblem& problem, const CallContext& call) {
  return append_on_device(problem, call.stream);
}

Status enqueue_plan(const AttentionProblem& problem, void* plan, void* workspace, const CallContext& call) {
  return make_attention_plan(problem, plan, workspace, call.stream);
}

}  // namespace

constinit const Backend kBackend = {
    .check = check_problem,
    .clear = enqueue_clear,
    .attention_plan_bytes = query<attention_plan_bytes>,
    .attention_plan_workspace = query<attention_plan_workspace>,
    .make_attention_plan = enqueue_plan,
    .forward_workspace = query<forward_workspace>,
    .forward = enqueue<forward>,
    .backward_workspace = query<backward_workspace>,
    .backward = enqueue<backward>,
    .plan_report_workspace = query<plan_report_workspace>,
    .plan_report = enqueue<plan_report>,
    .selection_workspace = query<selection_workspace>,
    .select_keys = enqueue<select_on_device>,
    .append_kept_keys = enqueue_appending,
    .mask_intervals_workspace = query<mask_intervals_workspace>,
    .mask_intervals = enqueue<find_intervals_on_device>,
};

}  // namespace flash_dmattn::internal::cuda
