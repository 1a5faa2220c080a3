#include "cuda/attention/key_tile_order.h"

#include <algorithm>
#include <cmath>

namespace flash_dmattn::internal::cuda {
namespace {

constexpr std::int64_t kMostSegments = 16;

std::int64_t divided_up(std::int64_t number, std::int64_t by) { return (number + by - 1) / by; }

// In steps, if tiles from `first_cut` on are cut.
double time_of(const KeyTiles& keys, std::int64_t first_cut, std::int64_t segments, std::int64_t processors) {
  // Sums have to be cleared, which takes as long as some fiftieth of a step for each tile, and read.
  constexpr double kClearing = 0.02;
  const std::int64_t count = keys.heads * keys.tiles, cut = count - first_cut;
  const bool cuts = segments > 1;
  const double segment =
      std::ceil(static_cast<double>(keys.steps) / static_cast<double>(segments)) + keys.work_steps * (cuts ? 1.5 : 1);
  const double clearing = cuts ? kClearing * static_cast<double>(cut) : 0;
  if (!keys.is_causal) {
    const double whole = static_cast<double>(keys.steps) + keys.work_steps;
    return static_cast<double>(divided_up(first_cut, processors)) * whole +
           static_cast<double>(divided_up(cut * segments, processors)) * segment + clearing;
  }
  // Those that come later fill what the longest leave.
  const double mean = (static_cast<double>(keys.steps) / static_cast<double>(segments) + keys.work_steps * 3) / 2;
  const double all = static_cast<double>(cut * segments) * mean / static_cast<double>(processors);
  return std::max(segment, all) + clearing;
}

}  // namespace

KeyTileOrder order_key_tiles(const KeyTiles& keys, std::int64_t processors) {
  KeyTileOrder order;
  const std::int64_t count = keys.heads * keys.tiles;
  if (count == 0) return order;
  if (keys.is_causal) {
    order.woven_heads = static_cast<std::int32_t>(std::min(keys.heads, divided_up(2 * processors, keys.tiles)));
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
