// What surrounds the kernels of every backward, whichever family they are of, beside the first pass (row_facts.h):
// sums are cleared before them and rounded to gradients after them. Every launcher returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/attention/params.h"

namespace flash_dmattn::internal::cuda {

// Clears fp32 sums of keys, (colors, B, Sk, Hkv, bucket) or null, of heads for which some chunk of the plan has a list.
// `stored` (B, Hkv) says of which heads none has.
cudaError_t launch_clear_key_sums(const BackwardProblem& problem, const DevicePlan& plan, int colors, float* dkey_sums,
                                  float* dvalue_sums, std::uint8_t* stored, cudaStream_t stream);
// dkey and dvalue from fp32 sums (colors, B, Sk, Hkv, bucket), except of heads that are `stored` (B, Hkv; null: none).
// Null sums: not wanted.
cudaError_t launch_key_gradients(const BackwardProblem& problem, int colors, float* dkey_sums, float* dvalue_sums,
                                 std::uint8_t* stored, cudaStream_t stream);
// dbias from fp32 sums of its shape.
cudaError_t launch_bias_gradients(const float* sums, std::int64_t count, DType dtype, void* gradient,
                                  cudaStream_t stream);
// dbias, the same for every row, from fp32 sums (colors, B, H, Sk), each by one thread in one order.
cudaError_t launch_reduced_bias_gradients(const BackwardProblem& problem, const float* sums, int colors,
                                          cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
