#include "cuda/attention/key_tile_order.h"

#include <algorithm>

#include "core/rounding.h"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr std::int64_t kMostSegments = 16;

// In steps, if tiles from `first_cut` on are cut.
double time_of(const KeyTiles& keys, std::int64_t first_cut, std::int64_t segments, std::int64_t processors) {
  // Of tiles that are cut sums have to be cleared, which takes as long as a fiftieth of a step for each, added to and
  // read.
  constexpr double kClearing = 0.02, kAdding = 1.5;
  const bool cuts = segments > 1;
  const std::int64_t cut = keys.heads * keys.tiles - first_cut;
  const double clearing = cuts ? kClearing * static_cast<double>(cut) : 0;
  const double beside_steps = keys.work_steps * (cuts ? kAdding : 1);  // of a segment, or a tile
  const double steps = static_cast<double>(ceil_div(keys.steps, segments));
  if (!keys.is_causal) {
    const double whole_tiles =
        static_cast<double>(ceil_div(first_cut, processors)) * (static_cast<double>(keys.steps) + keys.work_steps);
    return whole_tiles + static_cast<double>(ceil_div(cut * segments, processors)) * (steps + beside_steps) + clearing;
  }
  // The longest starts first, and those that come later, half as long on average, fill what it leaves.
  const double all = static_cast<double>(cut * segments) * (steps / 2 + beside_steps);
  return std::max(steps + beside_steps, all / static_cast<double>(processors)) + clearing;
}

}  // namespace

KeyTileOrder order_key_tiles(const KeyTiles& keys, std::int64_t processors) {
  KeyTileOrder order;
  const std::int64_t count = keys.heads * keys.tiles;
  if (count == 0) return order;
  if (keys.is_causal) {
    order.woven_heads = static_cast<std::int32_t>(std::min(keys.heads, ceil_div(processors, keys.tiles)));
    if (count >= 2 * processors) return order;
  }
  const std::int64_t first_cut = keys.is_causal ? 0 : count - count % processors;
  double least = time_of(keys, first_cut, 1, processors);
  for (std::int64_t segments = 2; segments <= std::min(kMostSegments, keys.steps); ++segments) {
    const double time = time_of(keys, first_cut, segments, processors);
    if (time >= least) continue;
    least = time;
    order.segments = static_cast<std::int32_t>(segments);
  }
  if (order.segments > 1) order.first_cut = static_cast<std::int32_t>(first_cut);
  return order;
}

std::int64_t cut_tiles(const KeyTiles& keys, const KeyTileOrder& order) {
  return order.segments > 1 ? keys.heads * keys.tiles - order.first_cut : 0;
}

}  // namespace flash_dmattn::internal::cuda
