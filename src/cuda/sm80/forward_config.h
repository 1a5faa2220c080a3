// Tile sizes of the sm80 forward kernel.
#pragma once

#include <cstddef>

#include "cuda/plan/device_plan.h"

namespace flash_dmattn::internal::cuda {

// Each warp owns kWarpRows rows: with 32 a fragment of keys serves two products, which halves the reads from shared
// memory; wider heads leave registers for 16 only. kNarrow: for GPUs with kLeastSharedBytes of shared memory.
template <int kHeadDimBucket, int kValueDimBucket, bool kPlanned, bool kRowBias, bool kNarrow>
struct ForwardConfig {
  static constexpr int kHeadDim = kHeadDimBucket, kValueDim = kValueDimBucket;
  static_assert(kValueDim <= kHeadDim);  // results lie where queries were
  // A bias with rows of its own takes registers too.
  static constexpr int kWarpRows = kHeadDim <= (kRowBias ? 32 : 128) ? 32 : 16;
  static constexpr int kManyWarps = kHeadDim == 192 || (kRowBias && kHeadDim >= 64 && kHeadDim <= 128) ? 8 : 4;
  static constexpr int kWarps = kNarrow ? kManyWarps / 2 : kManyWarps;
  static constexpr int kTileKeys = kHeadDim == 64 && !kPlanned && !kRowBias ? 96 : 64;

  // Whether probabilities are made between the products of those before them: where it is faster (measured on an H200).
  static constexpr bool kMixesSoftmax = kHeadDim == 64;

  // kAhead of gemm_from_shared and gemm_from_registers.
  static constexpr int kKeyAhead = kHeadDim <= 128 ? 1 : 4;
  static constexpr int kValueAhead = kHeadDim <= 128 ? 1 : 2;

  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTileRows = kWarps * kWarpRows;
  static constexpr int kWords = kTileRows / kWordRows;  // visibility words of a key
  static constexpr int kBlocksPerProcessor = kWarps == 8 ? 1 : 2;

  // Shared memory: queries (later the result), keys, values, then PlannedTiles.
  static constexpr std::size_t kQueryBytes = std::size_t{kTileRows} * kHeadDim * 2;
  static constexpr std::size_t kKeyBytes = std::size_t{kTileKeys} * kHeadDim * 2;
  static constexpr std::size_t kValueBytes = std::size_t{kTileKeys} * kValueDim * 2;
  static constexpr std::size_t kTileSharedBytes = kQueryBytes + kKeyBytes + kValueBytes;
};

}  // namespace flash_dmattn::internal::cuda
