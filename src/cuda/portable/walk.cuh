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
  std::uint32_t full;              // those of which all rows see all keys
  std::int32_t group, next_group;  // first tile of this group of 32 and of the next
};

// Marks a tile of a walk of which all of the block's rows see all keys.
constexpr int kFullTile = 1 << 30;
__device__ inline bool is_full(int tile) { return tile >= 0 && (tile & kFullTile) != 0; }
__device__ inline int position_of(int tile) { return tile & (kFullTile - 1); }

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

  // Where the block's batch element and head begin, worked out once: 64-bit divisions are slow. Null: there is none.
  const std::int32_t *begins, *ends;
  const std::uint8_t* key_mask;
  const std::uint32_t* packed_words;
  const void* key_bias;
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

  template <typename Element, bool kRowBias>
  __device__ void start(const AttentionParams& params, int plan_chunk, int batch, int head, int first_row) {
    if (threadIdx.x % 32 == 0) walks[threadIdx.x / 32] = {0, 0, 0, 0};
    if (threadIdx.x == 0) {
      chunk = params.plan.chunks[plan_chunk];
      const Visibility& visibility = params.visibility;
      const auto at = [&](const BroadcastView& view, auto element) {
        return view.defined() ? static_cast<const decltype(element)*>(view.data) + view.offset(batch, head) : nullptr;
      };
      begins = at(visibility.begin, std::int32_t());
      ends = at(visibility.end, std::int32_t());
      key_mask = at(visibility.key_mask, std::uint8_t());
      packed_words = nullptr;
      if (visibility.packed.defined()) {
        packed_words = visibility.packed.words +
                       visibility.packed.offset(batch, head, first_row / kChunkRows, 0) * kChunkWords +
                       first_row % kChunkRows / kWordRows;
      }
      key_bias = nullptr;
      if (!kRowBias && params.bias.dtype == DType::kFloat32) {
        key_bias = at(params.bias, float());
      } else if (!kRowBias) {
        key_bias = at(params.bias, Element());
      }
    }
    __syncthreads();
  }

  // The next tile that rows of `units` see, perhaps marked kFullTile, or -1. Each warp walks on its own, all lanes
  // together.
  __device__ int next(const DevicePlan& plan, int plan_chunk, std::uint32_t units) {
    const int tiles = (chunk.count + kTileKeys - 1) / kTileKeys;
    WalkState& place = walks[threadIdx.x / 32];
    WalkState state = place;
    while (state.seen == 0 && state.next_group < tiles) {
      const int tile = state.next_group + static_cast<int>(threadIdx.x) % 32;
      std::uint32_t tile_units = 0, tile_full = 0;
      if (tile < tiles) {
        const std::int64_t entry = static_cast<std::int64_t>(plan_chunk) * plan.tiles + tile;
        tile_units = plan.tile_units[entry];
        tile_full = plan.tile_full[entry];
      }
      state = {__ballot_sync(~0u, (tile_units & units) != 0), __ballot_sync(~0u, (tile_full & units) == units),
               state.next_group, state.next_group + 32};
    }
    const int bit = __ffs(static_cast<int>(state.seen)) - 1;
    __syncwarp();
    if (threadIdx.x % 32 == 0) place = {state.seen & (state.seen - 1), state.full, state.group, state.next_group};
    __syncwarp();
    if (bit < 0) return -1;
    return (state.group + bit) | ((state.full >> bit & 1) != 0 ? kFullTile : 0);
  }

  __device__ static bool has_place() { return threadIdx.x < kTileKeys; }

  __device__ void request_index(const DevicePlan& plan, int plan_chunk, int tile, int buffer) {
    if (tile < 0 || !has_place()) return;
    const int position = position_of(tile) * kTileKeys + static_cast<int>(threadIdx.x);
    if (chunk.first >= 0) {
      index[buffer][threadIdx.x] = position < chunk.count ? chunk.first + position : -1;
    } else {
      // Lists are padded to whole tiles.
      copy_async_4(shared_address(&index[buffer][threadIdx.x]),
                   plan.keys + static_cast<std::int64_t>(plan_chunk) * plan.capacity + position, true);
    }
  }

  template <typename Element>
  __device__ InFlight request_facts(const AttentionParams& params, int tile, int buffer, int existing) {
    InFlight flight;
    if (tile < 0 || !has_place()) return flight;
    const int place = static_cast<int>(threadIdx.x), key = index[buffer][place];
    if (key < 0 || key >= existing) return flight;
    const Visibility& visibility = params.visibility;
    const bool full = is_full(tile);
    if (!full && begins != nullptr) {
      copy_async_4(shared_address(&begin[place]), begins + key * visibility.begin.key_stride, true);
      copy_async_4(shared_address(&end[place]), ends + key * visibility.end.key_stride, true);
    }
    if (!full && packed_words != nullptr) {
      const std::uint32_t* words = packed_words + key * visibility.packed.key_stride * kChunkWords;
#pragma unroll
      for (int word = 0; word < kWords; ++word) copy_async_4(shared_address(&packed[place][word]), words + word, true);
    }
    if (!full && key_mask != nullptr) flight.hidden = key_mask[key * visibility.key_mask.key_stride] == 0;
    if (key_bias != nullptr) {
      const std::int64_t offset = key * params.bias.key_stride;
      flight.bias = params.bias.dtype == DType::kFloat32
                        ? static_cast<const float*>(key_bias)[offset]
                        : static_cast<float>(static_cast<const Element*>(key_bias)[offset]);
    }
    return flight;
  }

  __device__ void make_facts(const Visibility& visibility, const InFlight& flight, int tile, int buffer, int existing,
                             int first_row) {
    if (tile < 0 || !has_place()) return;
    const int place = static_cast<int>(threadIdx.x), key = index[buffer][place];
    facts[buffer].bias[place] = flight.bias * kLog2E;
    if (is_full(tile)) {
      facts[buffer].key[place] = key;  // nobody looks at words
      return;
    }
    RowRange range = {0, visibility.rows};
    if (key < 0 || key >= existing || flight.hidden) range.end = 0;
    if (visibility.is_causal) range.begin = key - (existing - visibility.rows);
    if (begins != nullptr && range.end != 0) {
      range.begin = max(range.begin, begin[place]);
      range.end = min(range.end, end[place]);
    }
    std::uint32_t any = 0;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const int row = first_row + word * kWordRows;
      std::uint32_t visible = bit_range(range.begin - row, range.end - row);
      if (packed_words != nullptr && range.end != 0) visible &= packed[place][word];
      facts[buffer].words[word][place] = visible;
      any |= visible;
    }
    facts[buffer].key[place] = any != 0 ? key : -1;
  }
};

}  // namespace flash_dmattn::internal::cuda
