// Dynamic selection on the device: the same intervals as select_on_host, bit for bit, on a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "core/problem.h"

namespace flash_dmattn::internal::cuda {

// Bytes that select_keys needs, from the shapes, the window and the dtype alone: no pointer is looked at. With k the
// size of a key there (16 bytes for float64, 4 for 16-bit scores of up to 65536 keys, else 8): k per key and head up to
// 32768 keys (16384 for float64), beyond that at most k * (3 + log2(window / 1024)) or so. None if nothing is evicted.
std::size_t selection_workspace(const SelectionProblem&);

// Enqueues the selection. All pointers of the problem are device pointers, `workspace` too (aligned to 16 bytes; its
// bytes need no initial value). Reads nothing back, waits for nothing and allocates nothing, so that it can be captured
// into a graph. Two kernels up to 32768 keys (half as many for float64), 7 up to 65536 and one more for every doubling;
// one if nothing can be evicted. The caller has validated the problem. Returns what a launch fails with,
// cudaErrorInvalidValue for a dtype that is no score's.
cudaError_t select_keys(const SelectionProblem&, void* workspace, cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
