// Whether a GPU can run what was compiled, and what its blocks may take.
#pragma once

#include <cstddef>

#include "flash_dmattn/status.h"

namespace flash_dmattn::internal::cuda {

// Names the current device's compute capability if nothing was compiled that it runs.
Status check_current_device();

// Bytes of shared memory that a block may have on the current device; on the one that the environment variable
// FLASH_DMATTN_ARCH names, if it has less: with "sm_86" kernels work as on such a GPU, for tests and comparisons.
std::size_t shared_limit();

}  // namespace flash_dmattn::internal::cuda
