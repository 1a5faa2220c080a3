#include "cuda/clear.h"

#include <algorithm>
#include <cstdint>

#include "cuda/launch_blocks.cuh"
#include "cuda/ptx/dependent_launch.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) clear_kernel(unsigned char* memory, std::size_t bytes) {
  begin_dependent_kernel();
  const std::size_t step = std::size_t{gridDim.x} * kThreads, thread = std::size_t{blockIdx.x} * kThreads + threadIdx.x;
  auto* pieces = reinterpret_cast<uint4*>(memory);
  const std::size_t count = bytes / sizeof(uint4);
  for (std::size_t piece = thread; piece < count; piece += step) pieces[piece] = make_uint4(0, 0, 0, 0);
  if (thread < bytes % sizeof(uint4)) memory[count * sizeof(uint4) + thread] = 0;
}

}  // namespace

cudaError_t launch_clear(void* memory, std::size_t bytes, cudaStream_t stream) {
  constexpr std::int64_t kMostBlocks = 1 << 16;  // each strides over what is left
  const auto pieces = static_cast<std::int64_t>((bytes + sizeof(uint4) - 1) / sizeof(uint4));
  const std::int64_t blocks = std::min((pieces + kThreads - 1) / kThreads, kMostBlocks);
  return launch_blocks(clear_kernel, {.blocks = blocks, .threads = kThreads, .is_dependent = true}, stream,
                       static_cast<unsigned char*>(memory), bytes);
}

}  // namespace flash_dmattn::internal::cuda
