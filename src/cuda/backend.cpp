#include "cuda/backend.h"

#include <cuda_runtime_api.h>

#include "core/arena.h"
#include "cuda/device_kernels.h"
#include "cuda/kernel_family.h"
#include "cuda/plan/prepared_visibility.h"
#include "cuda/selection/append_kept_keys.h"
#include "cuda/selection/device_selection.h"
#include "cuda/status_of.h"

namespace flash_dmattn::internal::cuda {

Status attention_plan_bytes(const AttentionProblem& problem, std::size_t* bytes) {
  *bytes = 0;
  if (!is_planned(problem)) return {};
  if (Status status = check_blocks(problem); !status.ok()) return status;
  Arena arena(nullptr);
  PreparedVisibility().arrange_plan(problem, &arena);
  *bytes = arena.used();
  return {};
}

Status attention_plan_workspace(const AttentionProblem& problem, std::size_t* bytes) {
  *bytes = 0;
  if (!is_planned(problem)) return {};
  if (Status status = check_blocks(problem); !status.ok()) return status;
  Arena plan(nullptr), staging(nullptr);
  PreparedVisibility prepared;
  prepared.arrange_plan(problem, &plan);
  prepared.arrange_staging(problem, &staging);
  *bytes = staging.used();
  return {};
}

Status make_attention_plan(const AttentionProblem& problem, void* plan, void* workspace, void* stream) {
  if (Status status = check_current_device(); !status.ok()) return status;
  Launches launches;
  Arena plan_arena(plan), staging(workspace);
  PreparedVisibility prepared;
  prepared.arrange_plan(problem, &plan_arena);
  prepared.arrange_staging(problem, &staging);
  prepared.write(problem, &launches, static_cast<cudaStream_t>(stream));
  return launches.status();
}

Status forward_workspace(const AttentionProblem& problem, std::size_t* bytes) {
  const Gpu gpu = current_gpu();
  return forward_family(problem, gpu).arrange_forward(problem, gpu, bytes);
}

Status forward(const ForwardProblem& problem, void* workspace, void* stream) {
  const Gpu gpu = current_gpu();
  return forward_family(problem, gpu).forward(problem, gpu, workspace, static_cast<cudaStream_t>(stream));
}

Status backward_workspace(const BackwardProblem& problem, std::size_t* bytes) {
  const Gpu gpu = current_gpu();
  return backward_family(problem, gpu).arrange_backward(problem, gpu, bytes);
}

Status backward(const BackwardProblem& problem, void* workspace, void* stream) {
  const Gpu gpu = current_gpu();
  return backward_family(problem, gpu).backward(problem, gpu, workspace, static_cast<cudaStream_t>(stream));
}

Status selection_workspace(const SelectionProblem& problem, std::size_t* bytes) {
  *bytes = selection_workspace(problem);
  return check_current_device();
}

Status select_on_device(const SelectionProblem& problem, void* workspace, void* stream) {
  return status_of(select_keys(problem, workspace, static_cast<cudaStream_t>(stream)));
}

Status append_on_device(const KeptKeysProblem& problem, void* stream) {
  if (Status status = check_current_device(); !status.ok()) return status;
  return status_of(append_kept_keys(problem, static_cast<cudaStream_t>(stream)));
}

}  // namespace flash_dmattn::internal::cuda
