// Tile sizes of the CPU kernels.
#pragma once

#include "plan/chunk_plan.h"

namespace flash_dmattn::internal::cpu {

// Listed keys that are packed and multiplied at a time: their K and V, and a row tile's scores against
// them, stay in the L2 cache.
constexpr int kKeyBlock = 256;
static_assert(kKeyBlock % kTileKeys == 0);

// Scores of a row tile are kept row by row, this many floats apart. One cache line more than the block,
// so that rows do not fall on the same cache sets.
constexpr int kScoreStride = kKeyBlock + 16;

// Rows of a score tile. The backward's products over rows are the longer the more rows a tile has.
constexpr int kForwardRowTile = 32;
constexpr int kBackwardRowTile = 64;

// Query rows, over all heads that share packed keys, which pay for packing a key: enough that packing
// is a few percent of the products.
constexpr int kChunkRowsTarget = 512;

}  // namespace flash_dmattn::internal::cpu
