// The CUDA backend of a build that has none.
#include "cuda/backend.h"
#include "flash_dmattn/info.h"

namespace flash_dmattn::internal::cuda {
namespace {

Status absent() {
  return Status::invalid("device", "must be one that this build has kernels for (it was built without CUDA)", "cuda");
}

}  // namespace

Status attention_plan_bytes(const AttentionProblem&, std::size_t*) { return absent(); }
Status attention_plan_workspace(const AttentionProblem&, std::size_t*) { return absent(); }
Status make_attention_plan(const AttentionProblem&, void*, void*, void*) { return absent(); }
Status forward_workspace(const AttentionProblem&, std::size_t*) { return absent(); }
Status backward_workspace(const BackwardProblem&, std::size_t*) { return absent(); }
Status forward(const ForwardProblem&, void*, void*) { return absent(); }
Status backward(const BackwardProblem&, void*, void*) { return absent(); }
Status selection_workspace(const SelectionProblem&, std::size_t*) { return absent(); }
Status select_on_device(const SelectionProblem&, void*, void*) { return absent(); }
Status plan_report_workspace(const AttentionProblem&, std::size_t*) { return absent(); }
Status plan_report(const AttentionProblem&, void*, void*, PlanReport*) { return absent(); }
Status mask_intervals_workspace(const MaskIntervalsProblem&, std::size_t*) { return absent(); }
Status find_intervals_on_device(const MaskIntervalsProblem&, void*, void*, bool*) { return absent(); }

}  // namespace flash_dmattn::internal::cuda

namespace flash_dmattn {

CudaInfo cuda_info() { return {}; }
std::string cuda_kernels(int, int) { return "none"; }

}  // namespace flash_dmattn
