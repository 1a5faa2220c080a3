// A few query rows over many keys, as a kernel family. It needs no plan: a backward has one of its own.
#include "cuda/attention/call.h"
#include "cuda/decode/decode.h"
#include "cuda/kernel_family.h"
#include "cuda/launch_blocks.cuh"
#include "cuda/status_of.h"

namespace flash_dmattn::internal::cuda {
namespace {

bool takes(const AttentionProblem& problem, const Gpu&) { return decode_applies(problem); }

Status arrange_forward(const AttentionProblem& problem, const Gpu& gpu, std::size_t* bytes) {
  *bytes = decode_workspace(problem, decode_gpu(gpu));
  return {};
}

Status forward(const ForwardProblem& problem, const Gpu& gpu, void* workspace, cudaStream_t stream) {
  PreparedVisibility prepared;
  prepared.visibility = visibility_of(problem);
  const ForwardParams params = forward_params(problem, gpu, prepared);
  const IndexViews& indices = problem.visibility.indices;
  log_call(kDecodeFamily.name, "", "forward", problem,
           indices.defined() ? "few rows: listed keys split among blocks" : "few rows: keys split among blocks");
  return status_of(launch_decode(params, indices, problem.dtype, decode_gpu(gpu), workspace, stream));
}

}  // namespace

DecodeGpu decode_gpu(const Gpu& gpu) { return {gpu.processors, gpu.capability == 90 && runs_sm90_code()}; }

const KernelFamily kDecodeFamily = {"decode", takes, arrange_forward, forward, nullptr, nullptr, nullptr};

}  // namespace flash_dmattn::internal::cuda
