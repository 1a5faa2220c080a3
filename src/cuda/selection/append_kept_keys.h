// The best keys of a growing cache, kept up to date on the device: the same as append_on_host, place by place.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"

namespace flash_dmattn::internal::cuda {

// Enqueues one kernel, of a block for every (batch, head), whose time follows the window and not the cache. All
// pointers of the problem are device pointers. Reads nothing back, waits for nothing and allocates nothing, so that it
// can be captured into a graph. Returns launch errors only.
cudaError_t append_kept_keys(const KeptKeysProblem&, cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
