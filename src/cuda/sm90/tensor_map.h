// Tensor maps: what the copy engine must know of query, key or value.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/problem.h"

namespace flash_dmattn::internal::cuda::sm90 {

// Whether the copy engine can address (B, S, heads, D) tokens of 2-byte elements: their rows begin at multiples of 16
// bytes and their strides are positive.
bool has_tensor_map(const TokenView& tokens, std::int64_t batch, std::int64_t count, std::int64_t heads);

// Of boxes of `rows` tokens by 64 columns, swizzled as matrix_descriptor (ptx/wgmma.cuh) has them.
cudaError_t make_tensor_map(const TokenView& tokens, DType dtype, std::int64_t batch, std::int64_t count,
                            std::int64_t heads, std::int64_t head_dim, int rows, CUtensorMap* map);

}  // namespace flash_dmattn::internal::cuda::sm90
