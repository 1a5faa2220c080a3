// Which tiles of keys a block of rows visits, and what it must know of each key of a tile.
#pragma once

#include <cstdint>

#include "cuda/params.h"
#include "cuda/plan/visibility.cuh"
#include "cuda/portable/scores.cuh"

namespace flash_dmattn::internal::cuda {

// Where a warp's walk over a chunk's list is; in shared memory, because kernels have no register to spare for it.
struct WalkState {
  std::uint32_t seen;              // tiles of the group that are still to visit
  std::int32_t group, next_group;  // first tile of this group of 32 and of the next
  std::int32_t padding;
};

// What a block knows of a tile's keys: which they are, which of the block's rows see them, their bias.
template <int kTileKeys, int kWords>
struct KeyFacts {
  std::int32_t key[kTileKeys];  // -1: no row of the block sees it; its place holds zeros
  std::uint32_t words[kWords][kTileKeys];
  float bias[kTileKeys];  // in units of log2; only if the bias is the same for every row
};

// The tiles of a chunk's list that some row of a block sees, and the facts of their keys, read ahead in three steps so
// that nothing waits for memory: the keys' indices three tiles ahead, what is known of each two tiles ahead, and words
// one tile ahead. A thread's place is its own until words are made.
template <int kTileKeys, int kWords, int kWarps>
struct PlannedTiles {
  using Facts = KeyFacts<kTileKeys, kWords>;
  static_assert(kTileKeys == kListTile && kTileKeys <= 32 * kWarps);

  Facts facts[2];
  std::uint32_t packed[kTileKeys][kWords];
  std::int32_t begin[kTileKeys], end[kTileKeys];
  std::int32_t index[2][kTileKeys];
  WalkState walks[kWarps];
  ChunkKeys chunk;

  // What comes in sizes that no background copy has, on its way.
  struct InFlight {
    float bias = 0;
    bool hidden = false;
  };

  __device__ void start(const DevicePlan& plan, int plan_chunk) {
    if (threadIdx.x % 32 == 0) walks[threadIdx.x / 32] = {0, 0, 0, 0};
    if (threadIdx.x == 0) chunk = plan.chunks[plan_chunk];
    __syncthreads();
  }

  // The next tile that rows of `units` see, or -1. Each warp walks on its own, all lanes together.
  __device__ int next(const DevicePlan& plan, int plan_chunk, std::uint32_t units) {
    const int tiles = (chunk.count + kTileKeys - 1) / kTileKeys;
    WalkState& place = walks[threadIdx.x / 32];
    WalkState state = place;
    while (state.seen == 0 && state.next_group < tiles) {
      const int tile = state.next_group + static_cast<int>(threadIdx.x) % 32;
      std::uint32_t tile_units = 0;
      if (tile < tiles) tile_units = plan.tile_units[static_cast<std::int64_t>(plan_chunk) * plan.tiles + tile];
      state = {__ballot_sync(~0u, (tile_units & units) != 0), state.next_group, state.next_group + 32, 0};
    }
    const int bit = __ffs(static_cast<int>(state.seen)) - 1;
    __syncwarp();
    if (threadIdx.x % 32 == 0) place = {state.seen & (state.seen - 1), state.group, state.next_group, 0};
    __syncwarp();
    return bit < 0 ? -1 : state.group + bit;
  }

  __device__ static bool has_place() { return threadIdx.x < kTileKeys; }

  __device__ void request_index(const DevicePlan& plan, int plan_chunk, int tile, int buffer) {
    if (tile < 0 || !has_place()) return;
    const int position = tile * kTileKeys + static_cast<int>(threadIdx.x);
    if (chunk.first >= 0) {
      index[buffer][threadIdx.x] = position < chunk.count ? chunk.first + position : -1;
    } else {
      // Lists are padded to whole tiles.
      copy_async_4(shared_address(&index[buffer][threadIdx.x]),
                   plan.keys + static_cast<std::int64_t>(plan_chunk) * plan.capacity + position, true);
    }
  }

  template <typename Element, bool kRowBias>
  __device__ InFlight request_facts(const AttentionParams& params, int tile, int buffer, int batch, int head,
                                    int existing, int first_row) {
    InFlight flight;
    if (tile < 0 || !has_place()) return flight;
    const int place = static_cast<int>(threadIdx.x), key = index[buffer][place];
    if (key < 0 || key >= existing) return flight;
    const Visibility& visibility = params.visibility;
    const auto request = [&](const BroadcastView& bound, std::int32_t* target) {
      copy_async_4(shared_address(target),
                   static_cast<const std::int32_t*>(bound.data) + bound.offset(batch, head) + key * bound.key_stride,
                   true);
    };
    if (visibility.begin.defined()) {
      request(visibility.begin, &begin[place]);
      request(visibility.end, &end[place]);
    }
    if (visibility.packed.defined()) {
      const PackedMask& mask = visibility.packed;
      const std::uint32_t* words = mask.words + mask.offset(batch, head, first_row / kChunkRows, key) * kChunkWords +
                                   first_row % kChunkRows / kWordRows;
#pragma unroll
      for (int word = 0; word < kWords; ++word) copy_async_4(shared_address(&packed[place][word]), words + word, true);
    }
    if (visibility.key_mask.defined()) {
      const BroadcastView& mask = visibility.key_mask;
      flight.hidden =
          static_cast<const std::uint8_t*>(mask.data)[mask.offset(batch, head) + key * mask.key_stride] == 0;
    }
    if (!kRowBias && params.bias.defined()) {
      const BroadcastView& bias = params.bias;
      flight.bias = load_bias<Element>(bias, bias.offset(batch, head) + key * bias.key_stride);
    }
    return flight;
  }

  __device__ void make_facts(const Visibility& visibility, const InFlight& flight, int tile, int buffer, int existing,
                             int first_row) {
    if (tile < 0 || !has_place()) return;
    const int place = static_cast<int>(threadIdx.x), key = index[buffer][place];
    RowRange range = {0, visibility.rows};
    if (key < 0 || key >= existing || flight.hidden) range.end = 0;
    if (visibility.is_causal) range.begin = key - (existing - visibility.rows);
    if (visibility.begin.defined() && range.end != 0) {
      range.begin = max(range.begin, begin[place]);
      range.end = min(range.end, end[place]);
    }
    std::uint32_t any = 0;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const int row = first_row + word * kWordRows;
      std::uint32_t visible = bit_range(range.begin - row, range.end - row);
      if (visibility.packed.defined() && range.end != 0) visible &= packed[place][word];
      facts[buffer].words[word][place] = visible;
      any |= visible;
    }
    facts[buffer].key[place] = any != 0 ? key : -1;
    facts[buffer].bias[place] = flight.bias * kLog2E;
  }
};

}  // namespace flash_dmattn::internal::cuda
