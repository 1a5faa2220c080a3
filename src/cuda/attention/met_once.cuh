// Tiles of rows that a single tile of keys meets (MetOnceTiles, params.h): found, and asked for.
#pragma once

#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/plan/chunk_of.cuh"
#include "cuda/plan/device_plan.h"

namespace flash_dmattn::internal::cuda {

// Whether blocks store dquery of such tiles. Works that have some take two kinds of steps, which is worth it from some
// share of all steps on.
__device__ inline bool stores_queries(const MetOnceTiles& met_once) {
  const auto least_share = static_cast<unsigned long long>(met_once.least_share);
  return met_once.tiles != nullptr && met_once.visits[1] * least_share >= met_once.visits[0];
}

// Of chunk `plan_chunk` of the plan, whether the tile that begins at row `first_row` is met once.
__device__ inline bool is_met_once(const MetOnceTiles& met_once, std::int64_t plan_chunk, int first_row) {
  return (met_once.tiles[plan_chunk] >> (first_row % kChunkRows / met_once.row_tile) & 1) != 0;
}
// The same for a query head, if blocks store such tiles.
__device__ inline bool stores_tile(const MetOnceTiles& met_once, const DevicePlan& plan, int batch, int head,
                                   int first_row) {
  return stores_queries(met_once) && is_met_once(met_once, chunk_of(plan, batch, head, first_row), first_row);
}

// Finds those of a chunk. By a block of kThreads.
template <int kThreads>
__device__ void find_met_once(const MetOnceTiles& met_once, const DevicePlan& plan, std::int64_t plan_chunk) {
  __shared__ std::uint32_t s_tiles;
  __shared__ int s_visits;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  if (thread == 0) s_tiles = 0, s_visits = 0;
  __syncthreads();
  const ChunkKeys keys = plan.chunks[plan_chunk];
  // As in RowWalk: tiles of ranges begin at multiples of their size, those of lists where the list does.
  const int parts = met_once.tile_keys / kPlanTileKeys, before = max(keys.first, 0) / kPlanTileKeys;
  const int end = before + (keys.count + kPlanTileKeys - 1) / kPlanTileKeys;
  const int tile_units = met_once.row_tile / kUnitRows;
  for (int row_tile = thread / 32; row_tile * tile_units < kChunkUnits; row_tile += kThreads / 32) {
    const std::uint32_t units = ((1u << tile_units) - 1) << (row_tile * tile_units);
    int visits = 0;
    for (int first = before / parts; first * parts < end; first += 32) {
      std::uint32_t any = 0;
      for (int part = 0; part < parts; ++part) {
        const int tile = (first + lane) * parts + part;
        if (tile >= before && tile < end) any |= plan.tile_units[plan_chunk * plan.tiles + tile - before];
      }
      visits += __popc(__ballot_sync(~0u, (any & units) != 0));
    }
    if (lane == 0) atomicAdd(&s_visits, visits);
    if (lane == 0 && visits == 1) atomicOr(&s_tiles, 1u << row_tile);
  }
  __syncthreads();
  if (thread != 0) return;
  met_once.tiles[plan_chunk] = s_tiles;
  if (s_visits == 0) return;
  atomicAdd(&met_once.visits[0], static_cast<unsigned long long>(s_visits));
  if (s_tiles != 0) atomicAdd(&met_once.visits[1], static_cast<unsigned long long>(__popc(s_tiles)));
}

}  // namespace flash_dmattn::internal::cuda
