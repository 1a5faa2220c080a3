// The tiles of keys that the blocks of a backward take one after another, as list_key_works has listed them: a work is
// a tile that has keys. They are listed by entries, of each key head (or share of its query heads) first the tiles of
// all keys, then those of one chunk's list after another; what is kept of an entry is where its works begin.
#pragma once

#include <cstdint>

#include "cuda/attention/block_order.cuh"
#include "cuda/attention/key_block.cuh"
#include "cuda/attention/key_works.h"
#include "cuda/attention/params.h"
#include "cuda/plan/device_plan.h"

namespace flash_dmattn::internal::cuda {

// Entries of a key head: tiles of all keys, and a list for each of the launch's chunks.
__device__ inline int key_work_lists(const BackwardParams& params) {
  return 1 + params.chunk_limit - params.first_chunk;
}
__device__ inline int key_work_entries(const BackwardParams& params) {
  return static_cast<int>(
      key_work_entries(params.batch, params.key_heads, params.splits, params.chunk_limit - params.first_chunk));
}

// The number (key_block.cuh) of an entry's first tile.
template <int kTileKeys>
__device__ inline unsigned first_tile_of(const BackwardParams& params, int entry) {
  const int lists = key_work_lists(params), key_tiles = range_tiles<kTileKeys>(params),
            list_tiles = params.plan.capacity / kTileKeys;
  const unsigned tiles = key_tiles + list_tiles * (lists - 1);
  const int list = entry % lists;
  return static_cast<unsigned>(entry / lists) * tiles + (list == 0 ? 0 : key_tiles + (list - 1) * list_tiles);
}

// The first entry of a block's key head, and of its share of the query heads, and the block's own.
__device__ inline int first_entry_of_key_head(const BackwardParams& params, const KeyBlock& block) {
  return (block.batch * params.key_heads + block.key_head) * params.splits * key_work_lists(params);
}
__device__ inline int first_entry_of_share(const BackwardParams& params, const KeyBlock& block) {
  const int share = (block.first_head - block.key_head * params.group) / (params.group / params.splits);
  return first_entry_of_key_head(params, block) + share * key_work_lists(params);
}
__device__ inline int entry_of(const BackwardParams& params, const KeyBlock& block) {
  return first_entry_of_share(params, block) + (block.listed ? 1 + block.first_chunk - params.first_chunk : 0);
}

// How many of the works come in order, the longest first.
__device__ inline int ordered_works(const BackwardParams& params, int works) {
  return params.works.last == nullptr ? 0 : min(works, kMostOrderedBlocks);
}

// The number of the tile of keys that is listed as `work`. By kLanes threads together: a warp, or one alone.
template <int kTileKeys, int kLanes>
__device__ inline int number_of_work(const BackwardParams& params, int work) {
  // The last entry that begins at the work or before has it, since an entry without works begins where the next one
  // does.
  int entry = 0, end = key_work_entries(params);
  while (end - entry > 1) {
    if constexpr (kLanes == 1) {
      const int middle = (entry + end) / 2;
      (params.works.starts[middle] <= work ? entry : end) = middle;
    } else {
      const int step = (end - entry + kLanes - 1) / kLanes,
                probe = entry + static_cast<int>(threadIdx.x % kLanes) * step;
      const unsigned before = __ballot_sync(~0u, probe < end && params.works.starts[probe] <= work);
      entry += (__popc(before) - 1) * step;
      end = min(end, entry + step);
    }
  }
  return static_cast<int>(first_tile_of<kTileKeys>(params, entry)) + work - params.works.starts[entry];
}

// What comes at a place: the number of a tile of keys, or
constexpr int kNoWork = -1, kNoMoreWorks = -2;

// Works before the first one of a key head, of all batch elements.
template <int kTileKeys, bool kPlanned>
__device__ inline int works_before(const BackwardParams& params, int key_head) {
  if constexpr (!kPlanned) return key_head * params.splits * range_tiles<kTileKeys>(params);
  return params.works.starts[key_head * params.splits * key_work_lists(params)];
}

// Which work comes at a place where blocks wait for turns. Key heads of a track follow one another; what a work waits
// for comes before it. By a warp, all lanes together: a lane for each track.
template <int kTileKeys, bool kPlanned>
__device__ inline int work_in_turn(const BackwardParams& params, int place) {
  const int heads = params.batch * params.key_heads, tracks = params.turns.tracks;
  const int lane = min(static_cast<int>(threadIdx.x) % 32, tracks - 1);
  const int first = works_before<kTileKeys, kPlanned>(params, lane * heads / tracks);
  const int end = works_before<kTileKeys, kPlanned>(params, (lane + 1) * heads / tracks);
  if (place / tracks >= __reduce_max_sync(~0u, end - first)) return kNoMoreWorks;
  const int work = __shfl_sync(~0u, first, place % tracks) + place / tracks;
  return work < __shfl_sync(~0u, end, place % tracks) ? work : kNoWork;
}

// By a warp, all lanes together.
template <int kTileKeys, bool kPlanned>
__device__ inline int key_work(const BackwardParams& params, int place) {
  const int works = works_before<kTileKeys, kPlanned>(params, params.batch * params.key_heads);
  int work = place < works ? place : kNoMoreWorks;
  if (params.turns.queries != nullptr) work = work_in_turn<kTileKeys, kPlanned>(params, place);
  if (!kPlanned || work < 0) return work;
  const int first = works - ordered_works(params, works);
  return number_of_work<kTileKeys, 32>(params, work < first ? work : first + params.works.last[work - first]);
}

}  // namespace flash_dmattn::internal::cuda
