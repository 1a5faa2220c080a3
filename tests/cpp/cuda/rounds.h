// How many random cases a test takes.
#pragma once

namespace flash_dmattn::internal {

// `count` on a GPU; some of them where kernels are emulated (emulation/), which takes longer.
constexpr int rounds(int count) {
#if defined(CUDA_EMULATION)
  constexpr int kShare = 20;
  return (count + kShare - 1) / kShare;
#else
  return count;
#endif
}

}  // namespace flash_dmattn::internal
