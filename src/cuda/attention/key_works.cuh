// The tiles of keys that the blocks of a backward take one after another, as list_key_works has listed them: a work is
// a tile that has keys. They are listed by entries, of each key head (or share of its query heads) first the tiles of
// all keys, then those of one chunk's list after another. Which works there are is looked up once for all: a block that
// did so itself would have a chain of a dozen reads and divisions before each of its works, thousands of cycles.
#pragma once

#include <cstdint>

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

// What comes at a place: the number of a work; or
constexpr int kNoWork = -1, kNoMoreWorks = -2;

// Without a plan, the works of so many key heads: tiles of keys, or segments of those that are cut (KeyTileOrder).
template <int kTileKeys>
__host__ __device__ inline int unplanned_works(const BackwardParams& params, int key_heads) {
  const int tiles = key_heads * params.splits * range_tiles<kTileKeys>(params), first_cut = params.tile_order.first_cut;
  return tiles <= first_cut ? tiles : first_cut + (tiles - first_cut) * params.tile_order.segments;
}

// Works before the first one of a key head, of all batch elements.
template <int kTileKeys, bool kPlanned>
__device__ inline int works_before(const BackwardParams& params, int key_head) {
  if constexpr (!kPlanned) return unplanned_works<kTileKeys>(params, key_head);
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

// How many works there are; without turns.
template <int kTileKeys, bool kPlanned>
__device__ inline int all_works(const BackwardParams& params) {
  if (params.turns.queries != nullptr) return 0;
  return works_before<kTileKeys, kPlanned>(params, params.batch * params.key_heads);
}

// By a warp, all lanes together. `works`: all_works, which can be read beside what says the place.
template <int kTileKeys, bool kPlanned>
__device__ inline int key_work(const BackwardParams& params, int place, int works) {
  if (params.turns.queries != nullptr) return work_in_turn<kTileKeys, kPlanned>(params, place);
  return place < works ? place : kNoMoreWorks;
}

// The number of the tile of keys that comes `place`-th. (Here and below: the divisions are only done where they are
// needed, as producers wait for them.)
template <int kTileKeys>
__device__ inline int tile_in_order(const BackwardParams& params, int place) {
  const int tiles = range_tiles<kTileKeys>(params), woven = params.tile_order.woven_heads;
  const int first_woven_head = params.batch * params.key_heads * params.splits - woven;
  const int past = place - first_woven_head * tiles;
  if (past < 0) return place;
  return (first_woven_head + past % woven) * tiles + past / woven;
}

// What a block owns that has taken this work.
template <int kTileKeys, bool kPlanned>
__device__ inline KeyBlock block_of_work(const BackwardParams& params, int work) {
  if constexpr (kPlanned) return params.works.blocks[work];
  const KeyTileOrder& order = params.tile_order;
  int place = work, cut = -1, segment = 0;
  if (work >= order.first_cut) {
    cut = (work - order.first_cut) / order.segments, segment = (work - order.first_cut) % order.segments;
    place = order.first_cut + cut;
  }
  const int tile = tile_in_order<kTileKeys>(params, place);
  KeyBlock block = key_block<kTileKeys, kPlanned>(params, static_cast<unsigned>(tile));
  block.cut = cut, block.segment = segment;
  return block;
}

}  // namespace flash_dmattn::internal::cuda
