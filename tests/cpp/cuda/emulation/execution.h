// What emulation.cpp, which runs kernels, does for runtime.cpp, which is told to launch them.
#pragma once

#include <functional>

#include "cuda_runtime_api.h"

namespace cuda_emulation {

// All blocks of a kernel, in clusters of so many, in any order of these.
void run(const cudaLaunchConfig_t& config, unsigned cluster_blocks, const std::function<void()>& thread);

}  // namespace cuda_emulation
