// What the host code of every kernel family needs: a problem's kernel parameters, the line that says what ran, launches
// by type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/arena.h"
#include "cuda/attention/head_dims.h"
#include "cuda/attention/params.h"
#include "cuda/device_kernels.h"
#include "cuda/plan/prepared_visibility.h"

namespace flash_dmattn::internal::cuda {

// What AttentionParams::aligned says: whether every row of the tokens begins at a multiple of 16 bytes, and whether the
// rows of all tensors are whole pieces of so many.
bool is_aligned(const TokenView& tokens);
bool has_whole_pieces(const AttentionProblem& problem);

// What all kernels take of a call.
void fill(const AttentionProblem& problem, const Gpu& gpu, const PreparedVisibility& prepared, AttentionParams* params);

// And what those of a forward do.
ForwardParams forward_params(const ForwardProblem& problem, const Gpu& gpu, const PreparedVisibility& prepared);

// Scratch of BlockOrder. Only a plan tells how long a block takes.
std::int32_t* take_order(bool planned, Arena* arena);

// Scratch of a forward, planned or not.
struct ForwardScratch {
  PreparedVisibility prepared;
  std::int32_t* order = nullptr;  // as in BlockOrder

  void arrange(const AttentionProblem& problem, Arena* arena);
};

// Elements of a bias, or of its gradient.
std::int64_t bias_elements(const BroadcastView& bias);

cudaError_t clear(void* memory, std::size_t bytes, cudaStream_t stream);

const char* plan_kind(const PreparedVisibility& prepared);
// If FLASH_DMATTN_LOG asks for it. `variant`: what tells the family's kernels apart, after a comma, or nothing.
// `direction`: "forward" or "backward".
void log_call(const char* family, const char* variant, const char* direction, const AttentionProblem& problem,
              const char* kind);

// Calls `launch` with an element and a bucket of head dims as template arguments.
template <typename Launch>
cudaError_t by_type(const AttentionProblem& problem, Launch launch) {
  const auto by_bucket = [&](auto element) {
    using Element = decltype(element);
    return with_bucket(wider_head_dim(problem),
                       [&]<int kHeadDim>() { return launch.template operator()<Element, kHeadDim>(); });
  };
  return problem.dtype == DType::kBFloat16 ? by_bucket(__nv_bfloat16()) : by_bucket(__half());
}

// The same with the bucket of values, too.
template <typename Launch>
cudaError_t by_types(const AttentionProblem& problem, Launch launch) {
  return by_type(problem, [&]<typename Element, int kHeadDim>() {
    return with_value_bucket<kHeadDim>(
        problem.value_dim, [&]<int kValueDim>() { return launch.template operator()<Element, kHeadDim, kValueDim>(); });
  });
}

}  // namespace flash_dmattn::internal::cuda
