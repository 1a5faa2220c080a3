// What producers of a planned forward read of a work: where all of it lies, and which tiles of keys its rows see.
#pragma once

#include <climits>
#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/attention/tokens.cuh"
#include "cuda/plan/chunk_of.cuh"
#include "cuda/plan/visibility.cuh"
#include "cuda/sm90/work_queue.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

// Where a block's batch element and head begin, worked out once: 64-bit divisions are slow. Null: there is none.
struct PlannedSources {
  const std::uint16_t *tile_units, *tile_full;  // of the chunk
  const std::int32_t* listed;                   // the chunk's keys; null: they are a range
  const std::int32_t *begins, *ends;
  const std::uint8_t* key_mask;
  const std::uint32_t* packed_words;
  // Of keys before this one, most of a causal mask's, the block's rows see what packed words say: nothing cuts these.
  std::int32_t uncut_end;
  const void* key_bias;
  const std::uint16_t *keys, *values;
  std::int32_t key_stride, value_stride;  // bytes from one to the next
  std::int32_t count, first;              // as in ChunkKeys
  int tiles;
};

template <typename Element>
__device__ inline void find_sources(const AttentionParams& params, const Work& work, PlannedSources* sources) {
  const Visibility& visibility = params.visibility;
  // entry_of_head without its division: short works wait for this.
  const auto entry_of = [&](std::int64_t head_divisor) {
    return static_cast<std::uint32_t>(head_divisor == 1 ? work.head : head_divisor == params.group ? work.key_head : 0);
  };
  const auto offset_of = [&](const auto& view) {
    return work.batch * view.batch_stride + entry_of(view.head_divisor) * view.head_stride;
  };
  const auto at = [&](const BroadcastView& view, auto element) {
    return view.defined() ? static_cast<const decltype(element)*>(view.data) + offset_of(view) : nullptr;
  };
  const std::int64_t plan_chunk =
      chunk_of_plan_head(params.plan, work.batch, entry_of(params.plan.head_divisor), work.first_row);
  const ChunkKeys chunk = params.plan.chunks[plan_chunk];
  sources->tile_units = params.plan.tile_units + plan_chunk * params.plan.tiles;
  sources->tile_full = params.plan.tile_full + plan_chunk * params.plan.tiles;
  sources->listed = chunk.first < 0 ? params.plan.keys + plan_chunk * params.plan.capacity : nullptr;
  sources->count = chunk.count;
  sources->first = chunk.first;
  sources->tiles = (chunk.count + kPlanTileKeys - 1) / kPlanTileKeys;
  sources->begins = at(visibility.begin, std::int32_t());
  sources->ends = at(visibility.end, std::int32_t());
  sources->key_mask = at(visibility.key_mask, std::uint8_t());
  sources->packed_words = nullptr;
  if (visibility.packed.defined()) {
    sources->packed_words = visibility.packed.words_at(offset_of(visibility.packed), work.first_row, 0);
  }
  sources->uncut_end = visibility.is_causal ? work.first_row + 1 + work.existing - params.rows : INT_MAX;
  if (visibility.begin.defined() || visibility.key_mask.defined()) sources->uncut_end = 0;
  // One that differs by row is left to consumers.
  sources->key_bias = params.bias.rows > 1                   ? nullptr
                      : params.bias.dtype == DType::kFloat32 ? static_cast<const void*>(at(params.bias, float()))
                                                             : at(params.bias, Element());
  sources->keys = rows_of(params.key, work.batch, work.key_head, 0).base;
  sources->values = rows_of(params.value, work.batch, work.key_head, 0).base;
  sources->key_stride = static_cast<std::int32_t>(params.key.token_stride) * 2;
  sources->value_stride = static_cast<std::int32_t>(params.value.token_stride) * 2;
}

// The tiles of a chunk that a block's rows see, one after another. Each warp has one of its own.
template <int kStageTiles>
class TileQueue {
 public:
  static constexpr int kRing = 64;
  // A tile: its position in the chunk and whether the block's first and second unit see all of its keys.
  static constexpr int kNoTile = -1;
  __device__ static int position(int tile) { return tile >> 2; }
  __device__ static std::uint32_t full_units(int tile) { return tile < 0 ? 0 : static_cast<std::uint32_t>(tile) & 3; }
  __device__ static bool is_full(int tile) { return full_units(tile) == 3; }

  // `unit`: the block's first unit in the chunk. `units`: how many it has, 1 or 2. `ring`: kRing tiles, for this warp.
  __device__ TileQueue(const PlannedSources& sources, int unit, int units, int* ring, int lane)
      : sources_(sources), ring_(ring), lane_(lane), unit_(unit), last_(units - 1) {
    request();
  }

  // The tiles of the next stage, kNoTile where there are none left.
  __device__ void next(int (&tiles)[kStageTiles]) {
    while (end_ - begin_ <= kStageTiles && first_ < sources_.tiles) look();
#pragma unroll
    for (int tile = 0; tile < kStageTiles; ++tile) {
      tiles[tile] = begin_ + tile < end_ ? ring_[(begin_ + tile) % kRing] : kNoTile;
    }
    begin_ += kStageTiles;
  }
  __device__ bool empty() const { return begin_ >= end_; }

 private:
  // Reads about 32 tiles, one a lane: units that see some of its keys, and above these those that see all.
  __device__ void request() {
    const int tile = first_ + lane_;
    units_ = 0;
    if (tile < sources_.tiles) {
      units_ = sources_.tile_units[tile] | static_cast<std::uint32_t>(sources_.tile_full[tile]) << kChunkUnits;
    }
  }
  // Puts those into the queue that the block sees.
  __device__ void look() {
    const std::uint32_t units = units_ >> unit_, full = units >> kChunkUnits;
    const bool seen = ((units | units >> last_) & 1) != 0;
    const std::uint32_t all = __ballot_sync(~0u, seen);
    const int before = __popc(all & ((1u << lane_) - 1));
    const auto full_units = static_cast<int>((full & 1) | (full >> last_ & 1) << 1);
    if (seen) ring_[(end_ + before) % kRing] = (first_ + lane_) << 2 | full_units;
    end_ += __popc(all);
    first_ += 32;
    request();
    __syncwarp();
  }

  const PlannedSources& sources_;
  int* const ring_;
  const int lane_, unit_, last_;
  int first_ = 0;  // of the 32 tiles that are read about
  std::uint32_t units_;
  int begin_ = 0, end_ = 0;  // of the queue; modulo kRing in the ring
};

}  // namespace flash_dmattn::internal::cuda::sm90
