// Which tiles of query rows a block of keys visits, for the backward.
#pragma once

#include <cstdint>

#include "cuda/params.h"
#include "cuda/plan/device_plan.h"

namespace flash_dmattn::internal::cuda {

// Which keys a block owns.
struct KeyBlock {
  int batch, key_head, first_head, end_head;  // query heads, absolute
  int plan_chunk;                             // planned: the first of the chunks that the block meets
  int first_chunk, end_chunk;                 // planned: chunks of rows that the block meets
  int tile;                                   // of kKeys: in the chunk's list, or of all keys
  bool listed;                                // tile of a list
  int color;                                  // of the sums it adds to
};

// Head by head, the tiles of kRows rows that see any of a block's kKeys keys.
template <int kRows, int kKeys, bool kPlanned>
struct RowWalk {
  // A query head and a tile of rows.
  struct Step {
    int head, row_tile;  // row_tile -1: none
    bool full;           // planned: every row sees every key
    __device__ bool exists() const { return row_tile >= 0; }
    __device__ int first_row() const { return row_tile * kRows; }
  };

  int head, position;   // dense: the next tile of rows; planned: the chunk
  std::uint32_t units;  // planned: what is left of the chunk
  std::uint32_t full;   // planned: those units that see all of the block's keys

  // `existing`: key_count of the block's batch element.
  __device__ void start(const BackwardParams& params, const KeyBlock& block, int existing) {
    *this = {block.first_head, kPlanned ? block.first_chunk - 1 : first_row_tile(params, block, existing), 0, 0};
  }

  __device__ Step next(const BackwardParams& params, const KeyBlock& block, int existing) {
    if constexpr (!kPlanned) {
      if (position >= row_tiles(params)) {
        position = first_row_tile(params, block, existing);
        ++head;
      }
      if (head >= block.end_head || position >= row_tiles(params)) return {0, -1, false};
      return {head, position++, false};
    } else {
      constexpr int kTileUnits = kRows / kUnitRows;
      while (units == 0) {
        if (++position >= block.end_chunk) {
          if (++head >= block.end_head) return {0, -1, false};
          position = block.first_chunk;
        }
        look_at_chunk(params, block);
      }
      const int tile = (__ffs(static_cast<int>(units)) - 1) / kTileUnits;
      const std::uint32_t tile_units = ((1u << kTileUnits) - 1) << (tile * kTileUnits);
      units &= ~tile_units;
      return {head, position * (kChunkRows / kRows) + tile, (full & tile_units) == tile_units};
    }
  }

 private:
  __device__ static int row_tiles(const BackwardParams& params) { return (params.rows + kRows - 1) / kRows; }

  // Dense: the first tile of rows that sees any of the block's keys.
  __device__ static int first_row_tile(const BackwardParams& params, const KeyBlock& block, int existing) {
    const int first_key = block.tile * kKeys;
    if (first_key >= existing) return row_tiles(params);
    if (!params.visibility.is_causal) return 0;
    return min(max(0, first_key - (existing - params.rows)) / kRows, row_tiles(params));
  }

  // Notes the units of the chunk at `position` that see the block's keys.
  __device__ void look_at_chunk(const BackwardParams& params, const KeyBlock& block) {
    constexpr int kListTiles = kKeys / kListTile;
    const int plan_chunk = block.plan_chunk + position - block.first_chunk;
    int tile = block.tile * kListTiles;
    if (!block.listed) {
      const ChunkKeys chunk_keys = params.plan.chunks[plan_chunk];
      if (chunk_keys.first < 0) return;
      tile -= chunk_keys.first / kListTile;
    }
    const std::int64_t entry = static_cast<std::int64_t>(plan_chunk) * params.plan.tiles;
    full = ~0u;
#pragma unroll
    for (int part = 0; part < kListTiles; ++part) {
      const bool exists = tile + part >= 0 && tile + part < params.plan.tiles;
      units |= exists ? params.plan.tile_units[entry + tile + part] : 0;
      full &= exists ? params.plan.tile_full[entry + tile + part] : 0;
    }
  }
};

}  // namespace flash_dmattn::internal::cuda
