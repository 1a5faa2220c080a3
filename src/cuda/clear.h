// Clearing memory by a kernel, which, unlike a memset, may begin while the kernel before it ends, as may the one after
// it while it ends.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace flash_dmattn::internal::cuda {

// Enqueues that `bytes` from `memory` on, which is aligned to 16 bytes, become 0. The next kernel may be launched as
// one that begins with begin_dependent_kernel.
cudaError_t launch_clear(void* memory, std::size_t bytes, cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
