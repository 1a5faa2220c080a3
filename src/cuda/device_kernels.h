// Whether a GPU can run what was compiled.
#pragma once

#include "flash_dmattn/status.h"

namespace flash_dmattn::internal::cuda {

// Names the current device's compute capability if nothing was compiled that it runs.
Status check_current_device();

}  // namespace flash_dmattn::internal::cuda
