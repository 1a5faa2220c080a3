// Decides how a backward without a plan deals its tiles of keys to blocks that stay, so that these end together. A
// multiprocessor has one such block, and a tile of keys takes the longer, the more rows see it.
//
// - Where all tiles are alike, those that do not fill the GPU once more are cut: 2048 tiles on 132 multiprocessors take
//   the time of 16 rounds and have the work of 15.5.
// - Under the causal rule tiles of a head are seen by fewer and fewer rows. The longest start first (Graham, "Bounds on
//   Multiprocessing Timing Anomalies", 1969), but only of as many heads as have a tile for every multiprocessor:
//   blocks that work on one head share its rows in the cache, and a group's heads have many rows (docs/cuda.md).
// - A few tiles, which could not keep all multiprocessors busy, are all cut.
#pragma once

#include <cstdint>

#include "cuda/attention/params.h"

namespace flash_dmattn::internal::cuda {

struct KeyTiles {
  std::int64_t heads;  // key heads of all batch elements, or shares of their query heads
  std::int64_t tiles;  // of each head
  std::int64_t steps;  // of the tile that the most rows see
  double work_steps;   // what a work takes besides its own steps, as if it were as many more
  bool is_causal;
};

// An order without its arrays.
KeyTileOrder order_key_tiles(const KeyTiles&, std::int64_t processors);

// How many tiles are cut.
std::int64_t cut_tiles(const KeyTiles&, const KeyTileOrder&);

}  // namespace flash_dmattn::internal::cuda
