// Which tiles of query rows a block of keys visits, for the backward.
#pragma once

#include <cstdint>

#include "cuda/attention/key_block.cuh"
#include "cuda/attention/params.h"
#include "cuda/plan/device_plan.h"
#include "cuda/plan/visibility.cuh"

namespace flash_dmattn::internal::cuda {

// Head by head, the tiles of kTileRows rows that see any of a block's kTileKeys keys. Lies in shared memory and is
// walked by one warp, all lanes together.
template <int kTileRows, int kTileKeys, bool kPlanned>
struct RowWalk {
  // A query head and a tile of rows.
  struct Step {
    int head, row_tile;  // row_tile -1: none
    bool full;           // planned: every row sees every key
    __device__ bool exists() const { return row_tile >= 0; }
    __device__ int first_row() const { return row_tile * kTileRows; }
  };

  // Dense: `position` is the next tile of rows, and `tiles` steps are left. Planned: the chunks from `position` on were
  // looked at together, a lane each; bits of `chunks` and of `tiles` say which of them, and which tiles of the last one
  // taken, are left.
  struct State {
    int head, position;
    std::uint32_t chunks, chunk, tiles, full;
  };
  State state;
  std::uint32_t seen_chunks;                      // of the 32 chunks, those that see any of the keys
  std::uint32_t chunk_tiles[32], chunk_full[32];  // a bit a tile of kTileRows rows: sees some, or all, of the keys

  // `existing`: key_count of the block's batch element.
  __device__ void start(const BackwardParams& params, const KeyBlock& block, int existing) {
    if constexpr (kPlanned) {
      look_at_chunks(params, block, block.first_chunk);
      if (threadIdx.x % 32 == 0) state = {block.first_head, block.first_chunk, seen_chunks, 0, 0, 0};
    } else {
      if (threadIdx.x % 32 == 0) state = first_dense(params, block, existing);
    }
    __syncwarp();
  }

  // For list_key_works: how many units of rows the block visits in every `lanes`-th chunk, for one query head.
  __device__ static int visits(const BackwardParams& params, const KeyBlock& block, int lane, int lanes) {
    int visits = 0;
#pragma unroll 4
    for (int chunk = block.first_chunk + lane; chunk < block.end_chunk; chunk += lanes) {
      visits += __popc(units_of_chunk(params, block, block.tile, chunk).any);
    }
    return visits;
  }

  // Dense: the tile of rows that the walk meets in place of this one if it goes from the last to the first.
  __device__ static int mirrored(const BackwardParams& params, const KeyBlock& block, int existing, int row_tile) {
    return first_row_tile(params, block, existing) + row_tiles(params) - 1 - row_tile;
  }

  // Of every `apart`-th tile of keys before the block's, back from there, in its list or range: the first one that
  // meets the tile of rows `row_tile`, which the block meets; less than 0: none. By a warp, all lanes together.
  __device__ static int previous_tile(const BackwardParams& params, const KeyBlock& block, int row_tile, int apart) {
    if constexpr (!kPlanned) return block.tile - apart;  // earlier keys are seen by all rows that see later ones
    constexpr int kChunkTiles = kChunkRows / kTileRows;
    const int chunk = row_tile / kChunkTiles, lane = static_cast<int>(threadIdx.x) % 32;
    const ChunkKeys& keys = params.plan.chunks[block.plan_chunk + chunk - block.first_chunk];
    const int first = block.listed ? 0 : keys.first / kTileKeys;
    for (int last = block.tile - apart; last >= first; last -= 32 * apart) {
      const int tile = last - lane * apart;
      const std::uint32_t any = tile < first ? 0 : units_of_chunk(params, block, tile, chunk).any;
      const unsigned meeting = __ballot_sync(~0u, (tiles_of_units<false>(any) >> row_tile % kChunkTiles & 1) != 0);
      if (meeting != 0) return last - (__ffs(static_cast<int>(meeting)) - 1) * apart;
    }
    return -1;
  }

  __device__ Step next(const BackwardParams& params, const KeyBlock& block, int existing) {
    State at = state;
    __syncwarp();
    const Step step = kPlanned ? next_planned(params, block, at) : next_dense(params, block, existing, at);
    if (threadIdx.x % 32 == 0) state = at;
    __syncwarp();
    return step;
  }

 private:
  // Of all steps of the tile of keys, those of the block's segment.
  __device__ static State first_dense(const BackwardParams& params, const KeyBlock& block, int existing) {
    const int first_tile = first_row_tile(params, block, existing), tiles = row_tiles(params) - first_tile;
    const int steps = tiles * (block.end_head - block.first_head);
    if (block.cut < 0 || steps == 0) {
      return {block.first_head, first_tile, 0, 0, static_cast<std::uint32_t>(steps), 0};
    }
    const std::int64_t segments = params.tile_order.segments;
    const auto begin = static_cast<int>(steps * std::int64_t{block.segment} / segments),
               end = static_cast<int>(steps * (block.segment + std::int64_t{1}) / segments);
    return {
        block.first_head + begin / tiles, first_tile + begin % tiles, 0, 0, static_cast<std::uint32_t>(end - begin), 0};
  }

  __device__ static Step next_dense(const BackwardParams& params, const KeyBlock& block, int existing, State& at) {
    if (at.tiles == 0) return {0, -1, false};
    --at.tiles;
    if (at.position >= row_tiles(params)) {
      at.position = first_row_tile(params, block, existing);
      ++at.head;
    }
    return {at.head, at.position++, false};
  }

  __device__ Step next_planned(const BackwardParams& params, const KeyBlock& block, State& at) {
    while (at.tiles == 0) {
      if (at.chunks == 0) {
        if (at.head >= block.end_head) return {0, -1, false};
        const int looked_at = at.position;
        at.position += 32;
        if (at.position >= block.end_chunk) {
          at.position = block.first_chunk;
          if (++at.head >= block.end_head) return {0, -1, false};
        }
        if (at.position != looked_at) look_at_chunks(params, block, at.position);
        at.chunks = seen_chunks;
        if (at.chunks == 0) continue;
      }
      const int bit = __ffs(static_cast<int>(at.chunks)) - 1;
      at.chunks &= at.chunks - 1;
      at.chunk = at.position + bit;
      at.tiles = chunk_tiles[bit];
      at.full = chunk_full[bit];
    }
    const int tile = __ffs(static_cast<int>(at.tiles)) - 1;
    at.tiles &= at.tiles - 1;
    return {at.head, static_cast<int>(at.chunk) * (kChunkRows / kTileRows) + tile, (at.full >> tile & 1) != 0};
  }

  __device__ static int row_tiles(const BackwardParams& params) { return (params.rows + kTileRows - 1) / kTileRows; }

  // Dense: the first tile of rows that sees any of the block's keys.
  __device__ static int first_row_tile(const BackwardParams& params, const KeyBlock& block, int existing) {
    const int first_key = block.tile * kTileKeys;
    if (first_key >= existing) return row_tiles(params);
    if (!params.visibility.is_causal) return 0;
    return min(max(0, first_key - (existing - params.rows)) / kTileRows, row_tiles(params));
  }

  // Bits of units to bits of tiles: those with any unit (kAll: all units) set.
  template <bool kAll>
  __device__ static std::uint32_t tiles_of_units(std::uint32_t units) {
    constexpr int kUnits = kTileRows < kUnitRows ? 1 : kTileRows / kUnitRows,
                  kTiles = kTileRows < kUnitRows ? kUnitRows / kTileRows : 1;
    constexpr std::uint32_t kUnitMask = (1u << kUnits) - 1, kTileMask = (1u << kTiles) - 1;
    std::uint32_t tiles = 0;
#pragma unroll
    for (int i = 0; i < kChunkUnits / kUnits; ++i) {
      const std::uint32_t bits = units >> (i * kUnits) & kUnitMask;
      if (kAll ? bits == kUnitMask : bits != 0) tiles |= kTileMask << (i * kTiles);
    }
    return tiles;
  }

  // The units of a chunk that see some keys of the block's list, or range, in tile `key_tile`, and those that see all.
  struct Units {
    std::uint32_t any, all;
  };
  __device__ static Units units_of_chunk(const BackwardParams& params, const KeyBlock& block, int key_tile, int chunk) {
    constexpr int kListTiles = kTileKeys < kPlanTileKeys ? 1 : kTileKeys / kPlanTileKeys;
    const std::int64_t plan_chunk = static_cast<std::int64_t>(block.plan_chunk) + chunk - block.first_chunk;
    const ChunkKeys chunk_keys = block.listed ? ChunkKeys{0, 0} : params.plan.chunks[plan_chunk];
    if (chunk_keys.first < 0) return {0, 0};
    const int tile = key_tile * kTileKeys / kPlanTileKeys - chunk_keys.first / kPlanTileKeys;
    Units units = {0, ~0u};
#pragma unroll
    for (int part = 0; part < kListTiles; ++part) {
      const bool exists = tile + part >= 0 && tile + part < params.plan.tiles;
      const std::int64_t entry = plan_chunk * params.plan.tiles + tile + part;
      units.any |= exists ? params.plan.tile_units[entry] : 0;
      units.all &= exists ? params.plan.tile_full[entry] : 0;
    }
    return units;
  }

  // Of 32 chunks, a lane each.
  __device__ void look_at_chunks(const BackwardParams& params, const KeyBlock& block, int first_chunk) {
    const int lane = static_cast<int>(threadIdx.x) % 32, chunk = first_chunk + lane;
    const Units units = chunk < block.end_chunk ? units_of_chunk(params, block, block.tile, chunk) : Units{0, 0};
    std::uint32_t tiles = tiles_of_units<false>(units.any);
    // Rows of a unit may end before its last tile does.
    if (kTileRows < kUnitRows) tiles &= bit_range(0, row_tiles(params) - chunk * (kChunkRows / kTileRows));
    chunk_tiles[lane] = tiles;
    chunk_full[lane] = tiles_of_units<true>(units.all);
    const std::uint32_t seen = __ballot_sync(~0u, tiles != 0);
    if (lane == 0) seen_chunks = seen;
    __syncwarp();
  }
};

}  // namespace flash_dmattn::internal::cuda
