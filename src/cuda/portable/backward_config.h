// Tile sizes of the portable backward kernel.
#pragma once

#include <cstddef>

#include "cuda/plan/device_plan.h"

namespace flash_dmattn::internal::cuda {

// Eight warps share each of the five products; XxY below: X warps over its rows, Y over its columns.
template <int kHeadDimBucket>
struct BackwardConfig {
  static constexpr int kHeadDim = kHeadDimBucket;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr int kRows = kHeadDim <= 64 ? 128 : 64;                        // query rows of a step
  static constexpr int kKeys = kHeadDim <= 128 ? 128 : 64;                       // keys of a block
  static constexpr int kScoreRowWarps = kRows == 128 || kKeys == 64 ? 4 : 2;     // rows x keys
  static constexpr int kKeyWarps = kKeys == 128 ? 4 : 2;                         // keys x head dim
  static constexpr int kQueryRowWarps = kRows == 128 || kHeadDim == 96 ? 4 : 2;  // rows x head dim
  static constexpr int kStages = kHeadDim <= 128 ? 2 : 1;  // queries and output gradients on their way
  static constexpr int kWords = kRows / kWordRows;
  static constexpr int kListTiles = kKeys / kListTile;

  static constexpr std::size_t kKeyBytes = std::size_t{kKeys} * kHeadDim * 2;
  static constexpr std::size_t kRowBytes = std::size_t{kRows} * kHeadDim * 2;
  static constexpr std::size_t kScoreBytes = std::size_t{kRows} * kKeys * 2;
  // lse and delta of three steps; keys, their rows, bias and its gradient; words of two steps; and the rest.
  static constexpr std::size_t kRowFactBytes = 3 * 2 * kRows * sizeof(float);
  static constexpr std::size_t kKeyFactBytes = kKeys * (4 + 8 + 4 + 4 * kScoreRowWarps);
  static constexpr std::size_t kWordBytes = 2 * kWords * kKeys * 4;
  static constexpr std::size_t kSharedBytes =
      2 * kKeyBytes + kStages * 2 * kRowBytes + 2 * kScoreBytes + kRowFactBytes + kKeyFactBytes + kWordBytes + 128;
};

}  // namespace flash_dmattn::internal::cuda
