// The kernels with Hopper's asynchronous products and copies (wgmma, TMA), as a kernel family: so far the forward of
// what only the causal rule and lengths hide.
#include "cuda/attention/call.h"
#include "cuda/attention/score_rule.h"
#include "cuda/kernel_family.h"
#include "cuda/plan/prepared_visibility.h"
#include "cuda/sm90/forward_config.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/tensor_map.h"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kLeastBucket = 64;  // smaller heads leave the tensor cores waiting for exponentials: sm80 is as fast

bool has_tensor_maps(const AttentionProblem& problem) {
  return sm90::has_tensor_map(problem.query, problem.batch, problem.rows, problem.heads) &&
         sm90::has_tensor_map(problem.key, problem.batch, problem.keys, problem.key_heads) &&
         sm90::has_tensor_map(problem.value, problem.batch, problem.keys, problem.key_heads);
}

bool takes(const AttentionProblem& problem, const Gpu& gpu, Pass pass) {
  return pass == Pass::kForward && gpu.capability == 90 && bucket_of(problem.head_dim) >= kLeastBucket &&
         problem.keys > 0 && !is_planned(problem) &&
         !score_rule_of(problem.scale, problem.softcap, problem.bias.defined()).transforms && has_tensor_maps(problem);
}

Status arrange_forward(const AttentionProblem&, const Gpu&, std::size_t* bytes) {
  *bytes = 0;
  return {};
}

template <int kHeadDim>
CUresult make_maps(const AttentionProblem& problem, sm90::ForwardMaps* maps) {
  using Config = sm90::ForwardConfig<kHeadDim>;
  const auto make = [&](const TokenView& tokens, std::int64_t count, std::int64_t heads, int rows, CUtensorMap* map) {
    return sm90::make_tensor_map(tokens, problem.dtype, problem.batch, count, heads, problem.head_dim, rows, map);
  };
  CUresult result = make(problem.query, problem.rows, problem.heads, Config::kTileRows, &maps->query);
  if (result != CUDA_SUCCESS) return result;
  result = make(problem.key, problem.keys, problem.key_heads, Config::kTileKeys, &maps->key);
  if (result != CUDA_SUCCESS) return result;
  return make(problem.value, problem.keys, problem.key_heads, Config::kTileKeys, &maps->value);
}

Status forward(const ForwardProblem& problem, const Gpu& gpu, void*, cudaStream_t stream) {
  PreparedVisibility prepared;
  prepared.visibility = visibility_of(problem);
  const ForwardParams params = forward_params(problem, gpu, prepared);
  log_call(kSm90Family.name, "", "forward", problem, plan_kind(prepared));
  return status_of(by_type(problem, [&]<typename Element, int kHeadDim>() {
    if constexpr (kHeadDim >= kLeastBucket) {
      sm90::ForwardMaps maps;
      if (make_maps<kHeadDim>(problem, &maps) != CUDA_SUCCESS) return cudaErrorInvalidValue;
      return sm90::launch_forward<Element, kHeadDim>(params, maps, stream);
    } else {
      return cudaErrorInvalidValue;  // takes() declines
    }
  }));
}

}  // namespace

const KernelFamily kSm90Family = {"sm90", takes, arrange_forward, forward, nullptr, nullptr};

}  // namespace flash_dmattn::internal::cuda
