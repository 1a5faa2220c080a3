// Tile sizes of the pass that makes gradients of queries alone.
#pragma once

#include <cstddef>

#include "cuda/plan/device_plan.h"

namespace flash_dmattn::internal::cuda {

template <int kHeadDimBucket, bool kPlanned>
struct QueryBackwardConfig {
  static constexpr int kHeadDim = kHeadDimBucket;
  static constexpr int kWarps = kHeadDim <= 128 ? 8 : 4;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kWarps;
  static constexpr int kTileKeys = kListTile;
  static constexpr int kWords = kRows / kWordRows;
  static constexpr int kStages = kHeadDim <= 128 ? 2 : 1;  // tiles of keys and values on their way
  static constexpr std::size_t kRowBytes = std::size_t{kRows} * kHeadDim * 2;
  static constexpr std::size_t kTileBytes = std::size_t{kTileKeys} * kHeadDim * 2;
  static constexpr std::size_t kPlanBytes =
      40 + std::size_t{kTileKeys} * 4 * (2 * (kWords + 2) + kWords + 4) + 16 * kWarps + 8;
  static constexpr std::size_t kSharedBytes = 2 * kRowBytes + kStages * 2 * kTileBytes + (kPlanned ? kPlanBytes : 0);
};

}  // namespace flash_dmattn::internal::cuda
