// A backward as every family runs it: what comes before the kernels that own keys, and after them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <functional>

#include "core/problem.h"
#include "cuda/attention/backward_scratch.h"
#include "cuda/attention/params.h"
#include "cuda/device_kernels.h"

namespace flash_dmattn::internal::cuda {

// A family's own part of it.
struct BackwardKernels {
  const char *family, *variant;  // as in log_call
  BackwardTiles tiles;
  // Gradients of keys and values, or their sums, and sums of those of queries and bias.
  std::function<cudaError_t(const BackwardParams&, bool planned)> launch;
  // Lists the works of a planned `launch` beforehand (key_works.h), if it can beside the first pass over rows.
  std::function<cudaError_t(const BackwardParams&)> list_works;
  // dquery from the sums that it left, which lie as its threads' registers do.
  std::function<cudaError_t(const BackwardParams&)> launch_query_gradients;
  // dquery, and the sums of a bias gradient with rows, in one order: for a deterministic backward. Null: blocks stay
  // without a plan, too, and wait for their turn to add (SumTurns).
  std::function<cudaError_t(const BackwardParams&, bool planned)> launch_query_backward = nullptr;
};

// As in KernelFamily.
Status arrange_backward(const BackwardProblem& problem, BackwardTiles tiles, std::size_t* bytes);
Status run_backward(const BackwardProblem& problem, const Gpu& gpu, const BackwardKernels& kernels, void* workspace,
                    cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
