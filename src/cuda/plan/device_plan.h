// The plan on the device: for every chunk of kChunkRows query rows the keys that some of its rows see, in an order in
// which the rows of one unit see long runs of neighbours (ListOrder), and which units see each tile of those keys.
// Kernels walk tiles that their rows see and ask the Visibility for words only there.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/plan/visibility.h"

namespace flash_dmattn::internal::cuda {

constexpr int kPlanTileKeys = 64;  // keys of a tile

struct ChunkKeys {
  std::int32_t count;  // listed keys, and -1 where a list has none between these
  // -1: the keys are listed. Else they are first, first + 1, ..., first + count - 1 (first is a multiple of
  // kPlanTileKeys), of which some may be hidden from all rows.
  std::int32_t first;
};

// Heads and batch elements with the same visibility have one plan.
struct DevicePlan {
  const ChunkKeys* chunks = nullptr;   // (plan batches, plan heads, chunks)
  const std::int32_t* keys = nullptr;  // (plan batches, plan heads, chunks, capacity), -1 up to a multiple of 2 tiles
  // (plan batches, plan heads, chunks, tiles), a bit a unit: those of which some row may see a key of the tile, and
  // those of which every row sees all of its keys.
  const std::uint16_t* tile_units = nullptr;
  const std::uint16_t* tile_full = nullptr;
  const std::int32_t* unit_tiles = nullptr;  // (plan batches, plan heads, chunks, kChunkUnits): tiles that a unit sees
  std::int32_t chunk_count = 0;
  std::int32_t capacity = 0;  // keys of a list at most, a multiple of 2 * kPlanTileKeys
  std::int32_t tiles =
      0;  // tiles of all keys, even, and at least capacity / kPlanTileKeys; those past the last key are 0
  std::int32_t plan_heads = 1;
  bool per_batch = false;
  std::int64_t head_divisor = 1;

  // Which plan query head `head` of batch element `batch` uses, times chunk_count.
  constexpr std::int64_t first_chunk(std::int64_t batch, std::int64_t head) const {
    return ((per_batch ? batch : 0) * plan_heads + head / head_divisor) * chunk_count;
  }
};

}  // namespace flash_dmattn::internal::cuda
