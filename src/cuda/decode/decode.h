// Attention of a few query rows over many keys: one step of decoding, or a few speculative ones. The keys are split
// among blocks, which put the parts together where they are a cluster; else a second kernel does. Forward only; no
// plan, no packed mask.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/problem.h"
#include "cuda/attention/params.h"

namespace flash_dmattn::internal::cuda {

struct Gpu;

// Whether a problem (not empty, of a 16-bit type) has few rows and many keys: at most 16 query rows, at least 256 keys,
// and no mask or interval that differs by more than 4 rows and heads of a group. With lists of keys per row masks and
// intervals may be any, but the lists that a block reads have to be short: 65536 entries in all. From shapes and
// strides alone.
bool decode_applies(const AttentionProblem& problem);

// What the keys are divided by, besides shapes.
struct DecodeGpu {
  int processors = 1;         // multiprocessors
  bool has_clusters = false;  // it is a Hopper GPU that runs code for it: those of others have not been measured
};
DecodeGpu decode_gpu(const Gpu& gpu);

// Bytes of workspace (aligned to 64), from shapes alone.
std::size_t decode_workspace(const AttentionProblem& problem, const DecodeGpu& gpu);

// Enqueues the kernels of a problem to which decode_applies. `params` needs no plan, and neither key_mask nor packed
// words: the mask of any form is params.mask. `indices`: lists of keys per row, or not defined. `dtype`: of query, key,
// value and out. `gpu` as for decode_workspace. Returns launch errors only and never waits. Repeated runs give
// identical bits.
cudaError_t launch_decode(const ForwardParams& params, const IndexViews& indices, DType dtype, const DecodeGpu& gpu,
                          void* workspace, cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
