// Host launchers of the portable kernels. Every one returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/params.h"

namespace flash_dmattn::internal::cuda {

constexpr int kHeadDimBuckets[] = {32, 64, 96, 128, 192, 256};

// The smallest bucket that holds a head of `head_dim`.
constexpr int bucket_of(int head_dim) {
  for (int bucket : kHeadDimBuckets) {
    if (head_dim <= bucket) return bucket;
  }
  return 0;
}

// One unit of compilation for each element type and bucket (instance.cu).
template <typename Element, int kHeadDim>
cudaError_t launch_forward(const ForwardParams& params, bool planned, cudaStream_t stream);
template <typename Element, int kHeadDim>
cudaError_t launch_backward(const BackwardParams& params, bool planned, cudaStream_t stream);
// dquery, and the sums of a bias gradient with rows, in one order.
template <typename Element, int kHeadDim>
cudaError_t launch_query_backward(const BackwardParams& params, bool planned, cudaStream_t stream);

// The backward's tiles: those of GPUs with little shared memory are narrow.
struct BackwardTiles {
  int rows, keys;
};
BackwardTiles backward_tiles(int head_dim, std::size_t shared_limit);

// Fills (B, H, `padded_rows`) and sets *has_large_row, which was 0, where a row is large.
cudaError_t launch_row_facts(const BackwardProblem& problem, std::int64_t padded_rows, RowFacts* facts,
                             std::int32_t* has_large_row, cudaStream_t stream);
// Clears fp32 sums of keys, (colors, B, Sk, Hkv, bucket) or null, of heads for which some chunk of the plan has a list.
// `stored` (B, Hkv) says of which heads none has.
cudaError_t launch_clear_key_sums(const BackwardProblem& problem, const DevicePlan& plan, int colors, float* dkey_sums,
                                  float* dvalue_sums, std::uint8_t* stored, cudaStream_t stream);
// dquery from the sums that launch_backward left.
cudaError_t launch_query_gradients(const BackwardProblem& problem, std::size_t shared_limit, const float* sums,
                                   cudaStream_t stream);
// dkey and dvalue from fp32 sums (colors, B, Sk, Hkv, bucket), except of heads that are `stored` (B, Hkv; null: none).
// Null sums: not wanted.
cudaError_t launch_key_gradients(const BackwardProblem& problem, int colors, float* dkey_sums, float* dvalue_sums,
                                 std::uint8_t* stored, cudaStream_t stream);
// dbias from fp32 sums of its shape.
cudaError_t launch_bias_gradients(const float* sums, std::int64_t count, DType dtype, void* gradient,
                                  cudaStream_t stream);
// dbias, the same for every row, from fp32 sums (colors, B, H, Sk), each by one thread in one order.
cudaError_t launch_shared_bias_gradients(const BackwardProblem& problem, const float* sums, int colors,
                                         cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
