// Which tiles of keys a block of rows visits, and what it must know of each key of a tile.
#pragma once

#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/attention/scores.cuh"
#include "cuda/plan/visibility.cuh"
#include "cuda/ptx/arithmetic.cuh"

namespace flash_dmattn::internal::cuda {

// A tile of a walk: its position in the chunk, with these marks; less than 0: no tile.
constexpr int kFullTile = 1 << 30;    // every row of the block sees every key of the tile
constexpr int kDirectTile = 1 << 29;  // full, its keys are neighbours and have no bias: it is computed without KeyFacts
constexpr int kNoTile = -1;           // all bits are set, that of kDirectTile, too: no KeyFacts are made for it
__device__ inline bool is_full(int tile) { return (tile & kFullTile) != 0; }
__device__ inline bool needs_facts(int tile) { return (tile & kDirectTile) == 0; }
__device__ inline int position_of(int tile) { return tile & (kDirectTile - 1); }

// The units of a chunk that hold the kTileRows rows from `first_row` on.
template <int kTileRows>
__device__ inline std::uint32_t units_of_block(int first_row) {
  constexpr int kUnits = kTileRows < kUnitRows ? 1 : kTileRows / kUnitRows;
  return ((1u << kUnits) - 1) << (first_row % kChunkRows / kUnitRows);
}

// What a block knows of a tile's keys: which they are, which of the block's rows see them, their bias.
template <int kTileKeys, int kWords>
struct KeyFacts {
  std::int32_t key[kTileKeys];  // -1: no row of the block sees it; the tile holds zeros there
  std::uint32_t words[kWords][kTileKeys];
  float bias[kTileKeys];  // only if it is the same for every row
};

// The tiles of a chunk's list that some row of a block sees, and the facts of their keys, read ahead in three steps so
// that nothing waits for memory: the keys' indices three tiles ahead, what is known of each two tiles ahead, and words
// one tile ahead. Slot t of these arrays is thread t's own until words are made.
template <int kTileKeys, int kWords, int kWarps>
struct PlannedTiles {
  using Facts = KeyFacts<kTileKeys, kWords>;
  static_assert(kTileKeys == kPlanTileKeys && kTileKeys <= 32 * kWarps);
  // Tiles of the chunk that are looked at together: with two warps shared memory is short.
  static constexpr int kBatch = kWarps <= 2 ? 32 : 32 * kWarps;
  static constexpr int kQueueEnd = -2;

  // Where the block's batch element and head begin, worked out once: 64-bit divisions are slow. Null: there is none.
  const std::int32_t *begins, *ends;
  const std::uint8_t* key_mask;
  const std::uint32_t* packed_words;
  const void* key_bias;
  Facts facts[2];
  std::uint32_t packed[kTileKeys][kWords];
  std::int32_t begin[kTileKeys], end[kTileKeys];
  std::int32_t index[kTileKeys];
  // The walk: what the plan says of the next batch, and the tiles to visit of this one.
  std::uint16_t units[kBatch], full[kBatch];
  std::int32_t queue[kBatch + 1];  // then kQueueEnd
  std::int32_t counts[kWarps];
  std::int32_t looked_at;     // tiles of the chunk up to the end of the batch
  std::uint32_t block_units;  // units of the chunk that hold the block's rows
  bool is_plain;              // the chunk's keys are neighbours and have no bias: a full tile needs no KeyFacts
  ChunkKeys chunk;

  // What is known of a thread's key in sizes that cp.async cannot copy, bytes of a mask and biases of 16 bits:
  // registers that loads are under way to.
  struct InFlight {
    std::int32_t key = -1;
    float bias = 0;
    bool hidden = false;
  };

  template <typename Element, bool kRowBias, int kTileRows>
  __device__ void start(const AttentionParams& params, int plan_chunk, int batch, int head, int first_row) {
    request_batch(params.plan, plan_chunk, 0);
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
        packed_words = visibility.packed.words_at(visibility.packed.offset(batch, head, 0, 0), first_row, 0);
      }
      key_bias = nullptr;
      if (!kRowBias && params.bias.dtype == DType::kFloat32) {
        key_bias = at(params.bias, float());
      } else if (!kRowBias) {
        key_bias = at(params.bias, Element());
      }
      is_plain = chunk.first >= 0 && !params.bias.defined();
      block_units = units_of_block<kTileRows>(first_row);
      queue[0] = kQueueEnd;
      looked_at = 0;
    }
    __syncthreads();
  }

  __device__ int tiles() const { return (chunk.count + kTileKeys - 1) / kTileKeys; }

  // Starts reading what the plan says of kBatch tiles. Past the last tile it reads zeros: no row sees those.
  __device__ void request_batch(const DevicePlan& plan, int plan_chunk, int first_tile) {
    constexpr int kPairs = kBatch / 2;
    const int thread = recomputed(static_cast<int>(threadIdx.x));  // seldom: not worth a register
    const int pair = thread % kPairs, tile = first_tile + 2 * pair;
    const bool exists = tile < plan.tiles;
    const std::int64_t entry = exists ? static_cast<std::int64_t>(plan_chunk) * plan.tiles + tile : 0;
    if (thread < kPairs) {
      copy_async_4(shared_address(&units[2 * pair]), plan.tile_units + entry, exists);
    } else if (thread < kBatch) {
      copy_async_4(shared_address(&full[2 * pair]), plan.tile_full + entry, exists);
    }
    commit_copies();
  }

  // Queues the tiles of the next batch that the block's rows see. By all threads. It waits for the reads of
  // request_batch, which have long arrived if the batch before had a tile to compute.
  __device__ void look_at_batch(const DevicePlan& plan, int plan_chunk) {
    const int thread = static_cast<int>(threadIdx.x), first_tile = looked_at;
    wait_copies<0>();
    __syncthreads();
    const bool seen = thread < kBatch && (units[thread] & block_units) != 0;
    const bool sees_all = seen && (full[thread] & block_units) == block_units;
    const std::uint32_t ballot = __ballot_sync(~0u, seen);
    if (thread % 32 == 0) counts[thread / 32] = __popc(ballot);
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      if (warp == thread / 32) before = all;
      all += counts[warp];
    }
    if (seen) {
      const int marks = sees_all ? kFullTile | (is_plain ? kDirectTile : 0) : 0;
      queue[before + __popc(ballot & ((1u << (thread % 32)) - 1))] = (first_tile + thread) | marks;
    }
    if (thread == 0) queue[all] = kQueueEnd, looked_at = first_tile + kBatch;
    request_batch(plan, plan_chunk, first_tile + kBatch);
    __syncthreads();
  }

  // The next tile that the block's rows see, or kNoTile. By all threads. `cursor`, the same in all and 0 at first,
  // is the next entry of the queue.
  __device__ int next(const DevicePlan& plan, int plan_chunk, int* cursor) {
    int tile = queue[*cursor];
    while (tile == kQueueEnd) {
      if (looked_at >= tiles()) return kNoTile;
      look_at_batch(plan, plan_chunk);
      *cursor = 0;
      tile = queue[0];
    }
    ++*cursor;
    return tile;
  }

  // Of a direct tile.
  __device__ int first_key(int tile) const { return chunk.first + position_of(tile) * kTileKeys; }

  __device__ static bool owns_slot() { return threadIdx.x < kTileKeys; }

  __device__ void request_index(const DevicePlan& plan, int plan_chunk, int tile) {
    if (!needs_facts(tile) || !owns_slot()) return;
    const int position = position_of(tile) * kTileKeys + static_cast<int>(threadIdx.x);
    if (chunk.first >= 0) {
      index[threadIdx.x] = position < chunk.count ? chunk.first + position : -1;
    } else {
      // Lists are padded to whole tiles.
      copy_async_4(shared_address(&index[threadIdx.x]),
                   plan.keys + static_cast<std::int64_t>(plan_chunk) * plan.capacity + position, true);
    }
  }

  template <typename Element>
  __device__ InFlight request_facts(const AttentionParams& params, int tile, int existing) {
    InFlight flight;
    if (!needs_facts(tile) || !owns_slot()) return flight;
    const int slot = static_cast<int>(threadIdx.x), key = index[slot];
    flight.key = key;
    if (key < 0 || key >= existing) return flight;
    const Visibility& visibility = params.visibility;
    const bool full = is_full(tile);
    if (!full && begins != nullptr) {
      copy_async_4(shared_address(&begin[slot]), begins + key * visibility.begin.key_stride, true);
      copy_async_4(shared_address(&end[slot]), ends + key * visibility.end.key_stride, true);
    }
    if (!full && packed_words != nullptr) {
      const std::uint32_t* words = visibility.packed.words_of_key(packed_words, key);
#pragma unroll
      for (int word = 0; word < kWords; ++word) copy_async_4(shared_address(&packed[slot][word]), words + word, true);
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
    if (!needs_facts(tile) || !owns_slot()) return;
    const int slot = static_cast<int>(threadIdx.x), key = flight.key;
    facts[buffer].bias[slot] = flight.bias;
    if (is_full(tile)) {
      facts[buffer].key[slot] = key;  // nobody looks at words
      return;
    }
    RowRange range = {0, visibility.rows};
    if (key < 0 || key >= existing || flight.hidden) range.end = 0;
    if (visibility.is_causal) range.begin = key - (existing - visibility.rows);
    if (begins != nullptr && range.end != 0) {
      range.begin = max(range.begin, begin[slot]);
      range.end = min(range.end, end[slot]);
    }
    std::uint32_t any = 0;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const int row = first_row + word * kWordRows;
      std::uint32_t visible = bit_range(range.begin - row, range.end - row);
      if (packed_words != nullptr && range.end != 0) visible &= packed[slot][word];
      facts[buffer].words[word][slot] = visible;
      any |= visible;
    }
    facts[buffer].key[slot] = any != 0 ? key : -1;
  }

  // Makes the facts of the first tile, in buffer 0, and starts on the next two. What it leaves under way belongs to the
  // caller's next group of copies.
  template <typename Element>
  __device__ InFlight make_first_facts(const AttentionParams& params, int plan_chunk, int tile, int ahead,
                                       int far_ahead, int existing, int first_row) {
    request_index(params.plan, plan_chunk, tile);
    commit_copies();
    wait_copies<0>();
    InFlight flight = request_facts<Element>(params, tile, existing);
    request_index(params.plan, plan_chunk, ahead);
    commit_copies();
    wait_copies<0>();
    make_facts(params.visibility, flight, tile, 0, existing, first_row);
    flight = request_facts<Element>(params, ahead, existing);
    request_index(params.plan, plan_chunk, far_ahead);
    __syncthreads();
    return flight;
  }
};

}  // namespace flash_dmattn::internal::cuda
