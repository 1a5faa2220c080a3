// Whether a GPU can run what was compiled, and what there is of it.
#pragma once

#include <cstddef>

#include "cuda/attention/params.h"
#include "flash_dmattn/status.h"

namespace flash_dmattn::internal::cuda {

// Names the current device's compute capability if nothing was compiled that it runs.
Status check_current_device();

// What kernels are chosen by. The environment variable FLASH_DMATTN_ARCH makes it less than the GPU has, for tests and
// comparisons: docs/development.md.
struct Gpu {
  int capability = 80;                           // 10 * major + minor
  std::size_t shared_limit = kLeastSharedBytes;  // bytes of shared memory that a block may have
  int processors = 1;                            // multiprocessors
};

// The current device; what every GPU has, if there is none.
Gpu current_gpu();

}  // namespace flash_dmattn::internal::cuda
