// Tile sizes of the sm80 backward kernel.
#pragma once

#include <cstddef>

#include "cuda/plan/device_plan.h"

namespace flash_dmattn::internal::cuda {

// The warps share each of the five products. kNarrow: for GPUs with kLeastSharedBytes of shared memory.
template <int kHeadDimBucket, int kValueDimBucket, bool kNarrow>
struct BackwardConfig {
  static constexpr int kHeadDim = kHeadDimBucket, kValueDim = kValueDimBucket;
  static constexpr int kWarps = kNarrow && kHeadDim == 256 ? 4 : 8, kThreads = 32 * kWarps;
  static constexpr int kTileRows = kNarrow ? (kHeadDim <= 128 ? 64 : 32) : kHeadDim <= 64 ? 128 : 64;  // rows of a step
  static constexpr int kTileKeys = kNarrow ? (kHeadDim <= 192 ? 64 : 32) : kHeadDim <= 128 ? 128 : 64;  // of a block
  // Whether probabilities are made between the products of their gradients: where it is faster (measured on an H200).
  static constexpr bool kMixesProbabilities = kHeadDim <= 128;
  // How many of the warps divide the first dimension of a product: rows x keys, keys x head dim, rows x head dim. The
  // others divide the second.
  static constexpr int kScoreRowWarps = kTileRows == 32 ? 2 : kTileRows == 128 || kTileKeys == 64 ? 4 : 2;
  static constexpr bool kOddDims = kHeadDim == 96 || (kNarrow && kHeadDim == 32);  // of which four warps take too few
  static constexpr int kKeyWarps = kTileKeys == 128 || kOddDims ? 4 : 2;
  static constexpr int kQueryRowWarps = kTileRows == 128 || kOddDims ? 4 : 2;
  // Stages of queries and output gradients. With two, those of the next step arrive while a step is computed.
  static constexpr int kStages = kNarrow && kHeadDim >= 128 ? 1 : 2;
  // kAhead of gemm_from_shared, for scores, gradients of probabilities and the others.
  static constexpr int kScoreAhead = 2;
#if __CUDA_ARCH__ >= 900
  static constexpr int kProbabilityAhead = kHeadDim == 128 ? 1 : 2;
  static constexpr bool kKeepsOrigin = kHeadDim <= 128;  // what depends on the thread, in registers
#else                                                    // where the compiler needs a register more
  static constexpr int kProbabilityAhead = kHeadDim == 64 || kHeadDim == 128 ? 1 : 2;
  static constexpr bool kKeepsOrigin = kHeadDim <= 128 && kHeadDim != 64;
#endif
  // Whether calls with large rows have a kernel of their own: where the loop has no registers left to ask for them.
  static constexpr bool kLargeRowsApart = kHeadDim == 64;
  static constexpr int kGradientAhead = 2;
  // As sm90's (sm90/backward_config.h): these kernels gain by it where a third of the steps are such, not where a tenth
  // are.
  static constexpr int kStoredShare = kHeadDim <= 128 ? 6 : 0;
  static constexpr bool kMayStoreQueries = kStoredShare > 0;
  static constexpr int kWords = kTileRows / kWordRows;

  static constexpr std::size_t kKeyBytes = std::size_t{kTileKeys} * kHeadDim * 2;
  static constexpr std::size_t kValueBytes = std::size_t{kTileKeys} * kValueDim * 2;
  static constexpr std::size_t kQueryBytes = std::size_t{kTileRows} * kHeadDim * 2;  // of a stage
  static constexpr std::size_t kOutputGradientBytes = std::size_t{kTileRows} * kValueDim * 2;
  static constexpr std::size_t kRowBytes = kQueryBytes + kOutputGradientBytes;
  static constexpr std::size_t kScoreBytes = std::size_t{kTileRows} * kTileKeys * 2;
  static constexpr std::size_t kTileSharedBytes = kKeyBytes + kValueBytes + kStages * kRowBytes + 2 * kScoreBytes;
};

}  // namespace flash_dmattn::internal::cuda
