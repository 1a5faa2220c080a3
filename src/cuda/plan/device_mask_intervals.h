// The intervals that say the same as a dense mask, found on the device: what find_intervals does on the host.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/problem.h"

namespace flash_dmattn::internal::cuda {

// Bytes of scratch memory for a mask of any strides: a count per key of every (batch, head), and the answer.
std::size_t mask_intervals_bytes(const MaskIntervalsProblem&);

// Whether its launches have no more blocks than a grid may.
bool mask_intervals_fit(const MaskIntervalsProblem&);

// Enqueues one pass over the mask and one over its keys; `workspace` is aligned to 64 bytes. Where the rows that see a
// key do not follow one another, for any key, *inexact (in the workspace) becomes 1, and the intervals mean nothing.
// Returns launch errors only; never waits.
cudaError_t mask_intervals(const MaskIntervalsProblem&, void* workspace, const int** inexact, cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
