// Tile sizes of the pass that makes gradients of queries alone.
#pragma once

#include <cstddef>

#include "cuda/plan/device_plan.h"

namespace flash_dmattn::internal::cuda {

// As in the forward, a warp owns 32 rows where registers allow, so that a fragment of keys serves two products. Scores
// of a tile are made in parts, since they and their gradients take registers at the same time. kNarrow: for GPUs with
// kLeastSharedBytes of shared memory.
template <int kHeadDimBucket, int kValueDimBucket, bool kNarrow>
struct QueryBackwardConfig {
  static constexpr int kHeadDim = kHeadDimBucket, kValueDim = kValueDimBucket;
  static constexpr int kWarpRows = kHeadDim <= 128 ? 32 : 16;
  static constexpr int kWarps = kNarrow ? 2 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kTileRows = kWarpRows * kWarps;
  static constexpr int kTileKeys = kPlanTileKeys;
  static constexpr int kPartKeys = kHeadDim == 128 ? 16 : 32;
  static constexpr int kWords = kTileRows / kWordRows;
  static constexpr int kStages = kHeadDim <= 64 ? 2 : 1;  // tiles of keys and values on their way
  static constexpr int kBlocksPerProcessor = kHeadDim <= 128 ? 2 : 1;
  static constexpr std::size_t kQueryBytes = std::size_t{kTileRows} * kHeadDim * 2;
  static constexpr std::size_t kOutputGradientBytes = std::size_t{kTileRows} * kValueDim * 2;
  static constexpr std::size_t kKeyBytes = std::size_t{kTileKeys} * kHeadDim * 2;
  static constexpr std::size_t kValueBytes = std::size_t{kTileKeys} * kValueDim * 2;
  static constexpr std::size_t kTileSharedBytes =
      kQueryBytes + kOutputGradientBytes + kStages * (kKeyBytes + kValueBytes);
};

}  // namespace flash_dmattn::internal::cuda
