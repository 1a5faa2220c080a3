// What blocks of the backward own, by their number.
#pragma once

#include <cstdint>

#include "cuda/attention/key_block.h"
#include "cuda/attention/params.h"
#include "cuda/plan/device_plan.h"

namespace flash_dmattn::internal::cuda {

// Whether one block has all rows of these keys, so that it stores results instead of adding to sums.
__device__ inline bool stores_results(const BackwardParams& params, int batch, int key_head) {
  return !params.uses_sums || (params.stored != nullptr && params.stored[batch * params.key_heads + key_head] != 0);
}

// Tiles of all keys, for what chunks have as ranges: 0 if the launch leaves these to another one.
template <int kTileKeys>
__host__ __device__ inline int range_tiles(const BackwardParams& params) {
  return params.takes_ranges ? (params.keys + kTileKeys - 1) / kTileKeys : 0;
}

// How many blocks a launch has or, if these stay for many, tiles of keys.
template <int kTileKeys, bool kPlanned>
__host__ __device__ inline std::int64_t key_blocks(const BackwardParams& params) {
  const std::int64_t chunks = kPlanned ? params.chunk_limit - params.first_chunk : 0;
  const std::int64_t tiles = range_tiles<kTileKeys>(params) + params.plan.capacity / kTileKeys * chunks;
  return tiles * params.batch * params.key_heads * params.splits;
}

// Of every key head first tiles of all keys; then, in a plan, tiles of the lists of this launch's chunks.
template <int kTileKeys, bool kPlanned>
__device__ inline KeyBlock key_block(const BackwardParams& params, unsigned number) {
  const int key_tiles = range_tiles<kTileKeys>(params);
  const int list_tiles = kPlanned ? params.plan.capacity / kTileKeys : 0;
  const auto tiles = static_cast<unsigned>(key_tiles + list_tiles * (params.chunk_limit - params.first_chunk));
  const int index = static_cast<int>(number % tiles), part = static_cast<int>(number / tiles);
  const int heads = params.group / params.splits;

  KeyBlock block;
  block.batch = part / (params.key_heads * params.splits);
  block.key_head = part / params.splits % params.key_heads;
  block.first_head = block.key_head * params.group + part % params.splits * heads;
  block.end_head = block.first_head + heads;
  block.listed = index >= key_tiles;
  block.tile = index;
  block.exists = true;
  block.first_chunk = block.plan_chunk = 0;
  block.end_chunk = params.plan.chunk_count;
  // Heads of a group that have lists of their own add to sums of their own.
  block.color = params.colors > 1 ? part % params.splits : 0;
  block.stores = !block.listed && stores_results(params, block.batch, block.key_head);
  if constexpr (kPlanned) {
    block.plan_chunk = static_cast<int>(params.plan.first_chunk(block.batch, block.first_head));
    if (block.listed) {
      const int chunk = (index - key_tiles) / list_tiles;
      if (params.colors > 1) block.color += chunk * params.splits;
      block.first_chunk = params.first_chunk + chunk;
      block.end_chunk = block.first_chunk + 1;
      block.plan_chunk += block.first_chunk;
      block.tile = (index - key_tiles) % list_tiles;
      const ChunkKeys keys = params.plan.chunks[block.plan_chunk];
      block.exists = keys.first < 0 && block.tile * kTileKeys < keys.count;
    }
  }
  return block;
}

}  // namespace flash_dmattn::internal::cuda
