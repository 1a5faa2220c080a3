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

// The number of the tile of keys that comes at this place, -1 past the last one. By a warp, all lanes together.
template <int kTileKeys>
__device__ inline int key_work(const BackwardParams& params, int place) {
  const int works = params.works.starts[key_work_entries(params)];
  if (place >= works) return -1;
  const int first = works - ordered_works(params, works);
  return number_of_work<kTileKeys, 32>(params, place < first ? place : first + params.works.last[place - first]);
}

}  // namespace flash_dmattn::internal::cuda
