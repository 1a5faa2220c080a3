// Tile sizes of the portable forward kernel.
#pragma once

#include <cstddef>

#include "cuda/plan/device_plan.h"

namespace flash_dmattn::internal::cuda {

// Each warp owns kWarpRows rows: with 32 a fragment of keys serves two products, which halves the reads from shared
// memory; wider heads leave registers for 16 only.
template <int kHeadDimBucket, bool kPlanned, bool kRowBias>
struct ForwardConfig {
  static constexpr int kHeadDim = kHeadDimBucket;
  // A bias with rows of its own takes registers too.
  static constexpr int kWarpRows = kHeadDim <= (kRowBias ? 64 : 128) ? 32 : 16;
  static constexpr int kWarps = kHeadDim == 192 || (kRowBias && (kHeadDim == 96 || kHeadDim == 128)) ? 8 : 4;
  static constexpr int kTileKeys = kHeadDim <= 64 && !kPlanned && !kRowBias ? 128 : 64;

  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = kWarps * kWarpRows;
  static constexpr int kWords = kRows / kWordRows;  // visibility words of a key
  static constexpr int kBlocksPerProcessor = kWarps == 8 ? 1 : 2;

  // Shared memory: queries (later the result), keys, values, then PlannedTiles.
  static constexpr std::size_t kQueryBytes = std::size_t{kRows} * kHeadDim * 2;
  static constexpr std::size_t kTileBytes = std::size_t{kTileKeys} * kHeadDim * 2;
  static constexpr std::size_t kPlanBytes =
      40 + std::size_t{kTileKeys} * 4 * (2 * (kWords + 2) + kWords + 4) + 16 * kWarps + 8;
  static constexpr std::size_t kSharedBytes = kQueryBytes + 2 * kTileBytes + (kPlanned ? kPlanBytes : 0);
};

}  // namespace flash_dmattn::internal::cuda
