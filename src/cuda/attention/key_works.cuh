// The tiles of keys that the blocks of a backward take one after another, as list_key_works has listed them: a work is
// a tile that has keys. They are listed by entries, of each key head (or share of its query heads) first the tiles of
// all keys, then those of one chunk's list after another; what is kept of an entry is where its works begin.
#pragma once

#include <cstdint>

#include "cuda/attention/block_order.cuh"
#include "cuda/attention/key_block.cuh"
#include "cuda/attention/params.h"
#include "cuda/plan/device_plan.h"

namespace flash_dmattn::internal::cuda {

// Entries of a key head: tiles of all keys, and a list for each of the launch's chunks.
__host__ __device__ inline int key_work_lists(const BackwardParams& params) {
  return 1 + params.chunk_limit - params.first_chunk;
}
__host__ __device__ inline int key_work_entries(const BackwardParams& params) {
  return params.batch * params.key_heads * params.splits * key_work_lists(params);
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

// The number of the tile of keys that comes at this place, -1 past the last one. By a warp, all lanes together.
template <int kTileKeys>
__device__ inline int key_work(const BackwardParams& params, int place) {
  const int entries = key_work_entries(params), works = params.works.starts[entries];
  if (place >= works) return -1;
  const int first = works - ordered_works(params, works);
  const int work = place < first ? place : first + params.works.last[place - first];
  // The last entry that begins at the work or before has it, since an entry without works begins where the next one
  // does.
  int entry = 0, end = entries;
  while (end - entry > 1) {
    const int step = (end - entry + 31) / 32, probe = entry + static_cast<int>(threadIdx.x % 32) * step;
    const unsigned before = __ballot_sync(~0u, probe < end && params.works.starts[probe] <= work);
    entry += (__popc(before) - 1) * step;
    end = min(end, entry + step);
  }
  return static_cast<int>(first_tile_of<kTileKeys>(params, entry)) + work - params.works.starts[entry];
}

}  // namespace flash_dmattn::internal::cuda
