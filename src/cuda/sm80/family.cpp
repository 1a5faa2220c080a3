// The kernels with mma.sync and cp.async, which every GPU from sm_80 on runs, as a kernel family. It takes every
// problem.
#include "cuda/attention/backward_call.h"
#include "cuda/attention/call.h"
#include "cuda/attention/key_works.h"
#include "cuda/device_kernels.h"
#include "cuda/kernel_family.h"
#include "cuda/sm80/launch.h"

namespace flash_dmattn::internal::cuda {
namespace {

bool takes_forward(const AttentionProblem&, const Gpu&) { return true; }
bool takes_backward(const BackwardProblem&, const Gpu&) { return true; }

const char* variant_on(const Gpu& gpu) { return is_narrow(gpu.shared_limit) ? ", narrow tiles" : ""; }

Status arrange_forward(const AttentionProblem& problem, const Gpu&, std::size_t* bytes) {
  Arena arena(nullptr);
  ForwardScratch().arrange(problem, &arena);
  *bytes = arena.used();
  return {};
}

Status forward(const ForwardProblem& problem, const Gpu& gpu, void* workspace, cudaStream_t stream) {
  Launches launches;
  Arena arena(workspace);
  ForwardScratch scratch;
  scratch.arrange(problem, &arena);
  PreparedVisibility& prepared = scratch.prepared;
  prepared.write(problem, &launches, stream);
  ForwardParams params = forward_params(problem, gpu, prepared);
  params.order.blocks = scratch.order;
  log_call(kSm80Family.name, variant_on(gpu), "forward", problem, plan_kind(prepared));
  launches.then([&] {
    return by_types(problem, [&]<typename Element, int kHeadDim, int kValueDim>() {
      return launch_forward<Element, kHeadDim, kValueDim>(params, prepared.planned, stream);
    });
  });
  return launches.status();
}

BackwardTiles tiles_of(const BackwardProblem& problem, const Gpu& gpu) {
  BackwardTiles tiles = backward_tiles(problem, gpu.shared_limit);
  // Kernels for a bias that differs by row have no registers for that.
  const bool has_row_bias = problem.bias.defined() && problem.bias.rows > 1;
  if (has_row_bias || !has_whole_pieces(problem)) tiles.stored_share = 0;
  return tiles;
}

Status arrange_backward(const BackwardProblem& problem, const Gpu& gpu, std::size_t* bytes) {
  return arrange_backward(problem, tiles_of(problem, gpu), bytes);
}

Status backward(const BackwardProblem& problem, const Gpu& gpu, void* workspace, cudaStream_t stream) {
  const auto launch = [&](const BackwardParams& params, bool planned) {
    return by_types(problem, [&]<typename Element, int kHeadDim, int kValueDim>() {
      return launch_backward<Element, kHeadDim, kValueDim>(params, planned, stream);
    });
  };
  const BackwardTiles tiles = tiles_of(problem, gpu);
  // These kernels gain more by ending together than by sharing rows in the cache.
  const auto list_works = [&](const BackwardParams& params) {
    return list_key_works(params, tiles.keys, kMostOrderedBlocks, stream);
  };
  const auto launch_of_queries = [&](const BackwardParams& params, bool planned) {
    return by_types(problem, [&]<typename Element, int kHeadDim, int kValueDim>() {
      return launch_query_backward<Element, kHeadDim, kValueDim>(params, planned, stream);
    });
  };
  const auto round_queries = [&](const BackwardParams& params) {
    return launch_query_gradients(problem, gpu.shared_limit, params, stream);
  };
  const BackwardKernels kernels = {.family = kSm80Family.name,
                                   .variant = variant_on(gpu),
                                   .tiles = tiles,
                                   .launch = launch,
                                   .list_works = list_works,
                                   .launch_query_gradients = round_queries,
                                   .launch_query_backward = launch_of_queries};
  return run_backward(problem, gpu, kernels, workspace, stream);
}

}  // namespace

const KernelFamily kSm80Family = {"sm80",         takes_forward,    arrange_forward, forward,
                                  takes_backward, arrange_backward, backward};

}  // namespace flash_dmattn::internal::cuda
