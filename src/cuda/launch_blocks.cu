#include "cuda/launch_blocks.cuh"

#include <array>
#include <atomic>

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kLeastPtx = 90;

// Compiled as every kernel is that is not for one architecture alone.
__global__ void probe_kernel() {}

bool ask_runtime() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, probe_kernel) == cudaSuccess && attributes.ptxVersion >= kLeastPtx;
}

}  // namespace

bool runs_sm90_code() {
  // What is known of the first devices is kept: asking the runtime costs more.
  constexpr std::size_t kRemembered = 64;
  enum Known : std::uint8_t { kUnknown, kNo, kYes };
  static std::array<std::atomic<Known>, kRemembered> known = {};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  const auto index = static_cast<std::size_t>(device);
  if (index >= kRemembered) return ask_runtime();
  if (known[index].load(std::memory_order_relaxed) == kUnknown) {
    known[index].store(ask_runtime() ? kYes : kNo, std::memory_order_relaxed);
  }
  return known[index].load(std::memory_order_relaxed) == kYes;
}

}  // namespace flash_dmattn::internal::cuda
