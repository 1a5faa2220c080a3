// The sm90 forward: flash attention with the tensor cores' asynchronous products (wgmma) and the copy engine (TMA).
//
// A block owns kTileRows query rows of one head, 64 for each of its consumers, warp groups that compute. One more warp
// group, the producer, brings the queries, and tiles of keys and values in turn, kStages of each. A stage is handed
// back and forth by two barriers: a phase of "full" ends when the copy is there, one of "empty" when all consumers have
// read it. While a consumer exponentiates the scores of one tile, the tensor cores compute the scores of the other
// consumers and add up their values.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/hide.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tokens.cuh"
#include "cuda/plan/visibility.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward_config.h"
#include "cuda/sm90/launch.h"

namespace flash_dmattn::internal::cuda::sm90 {

constexpr int kWarpGroup = 128;

// Named barriers of the block; that of turns comes once for each consumer.
constexpr int kConsumersBarrier = 1, kTurnBarrier = 2;

// The two barriers of each stage.
template <int kStages>
struct Pipeline {
  std::uint64_t full[kStages], empty[kStages];

  __device__ void init(int consumers) {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(shared_address(&full[stage]), 1);
      init_barrier(shared_address(&empty[stage]), consumers);
    }
  }
};

// Where a role stands in a pipeline: tile n is in stage n % kStages, in round n / kStages.
template <int kStages>
struct Position {
  int stage = 0;
  std::uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <typename Element, int kHeadDim>
struct ForwardBlock {
  using Config = ForwardConfig<kHeadDim>;
  static constexpr int kTileKeys = Config::kTileKeys, kStages = Config::kStages, kConsumers = Config::kConsumers;
  static constexpr int kKeyNTiles = kTileKeys / 8, kDimNTiles = kHeadDim / 8;
  // Bytes from one panel of 64 columns to the next.
  static constexpr std::uint32_t kQueryPanel = Config::kTileRows * 128, kTilePanel = kTileKeys * 128;

  struct Shared {
    Pipeline<kStages> keys, values;
    std::uint64_t queries, verdict;  // barriers: queries are there; `again` is known
    int batch, head, first_row;
    int existing;  // keys of the batch element
    bool again;    // a row turned out to be huge: the block's tiles are needed once more
  };
  static constexpr std::size_t kTilesBytes = Config::kQueryBytes + 2 * kStages * Config::kTileBytes;
  static constexpr std::size_t kSharedBytes = kTilesBytes + sizeof(Shared);

  const ForwardParams& params;
  const ForwardMaps& maps;
  std::uint32_t queries, keys, values;  // in shared memory
  Shared& shared;

  __device__ ForwardBlock(const ForwardParams& params, const ForwardMaps& maps, unsigned char* memory)
      : params(params),
        maps(maps),
        queries(shared_address(memory)),
        keys(queries + static_cast<std::uint32_t>(Config::kQueryBytes)),
        values(keys + static_cast<std::uint32_t>(kStages * Config::kTileBytes)),
        shared(*reinterpret_cast<Shared*>(memory + kTilesBytes)) {
    if (threadIdx.x == 0) {
      choose_rows();
      shared.existing = key_count(params.visibility, shared.batch);
      shared.again = false;
      shared.keys.init(kConsumers);
      shared.values.init(kConsumers);
      init_barrier(shared_address(&shared.queries), 1);
      init_barrier(shared_address(&shared.verdict), 1);
      fence_barrier_init();
    }
    __syncthreads();
  }

  // Blocks start in the order of their numbers. Under the causal rule the last rows see the most: those of as many
  // heads as fill the GPU start first. Else neighbours share keys and values in the cache.
  __device__ void choose_rows() {
    const int row_tiles = (params.rows + Config::kTileRows - 1) / Config::kTileRows;
    const int heads_at_once = params.visibility.is_causal ? (params.processors + row_tiles - 1) / row_tiles : 1;
    const auto at_once = static_cast<unsigned>(heads_at_once * row_tiles);
    const int first_pair = static_cast<int>(blockIdx.x / at_once) * heads_at_once;
    const int index = static_cast<int>(blockIdx.x % at_once);
    const int width = min(heads_at_once, params.batch * params.heads - first_pair);
    const int pair = first_pair + index % width;
    shared.batch = pair / params.heads, shared.head = pair % params.heads;
    shared.first_row = (row_tiles - 1 - index / width) * Config::kTileRows;
  }

  // Tiles of keys that the block's rows see, by length and causal rule.
  __device__ int tile_count() const {
    const int last_row = min(shared.first_row + Config::kTileRows, params.rows) - 1;
    return (causal_limit(params.visibility, shared.existing, last_row) + kTileKeys - 1) / kTileKeys;
  }

  // ---- Producer

  __device__ void load_panels(std::uint32_t target, std::uint32_t panel_bytes, const CUtensorMap& map, int token,
                              int head, std::uint32_t barrier) const {
    arrive_expecting(barrier, Config::kPanels * panel_bytes);
#pragma unroll
    for (int panel = 0; panel < Config::kPanels; ++panel) {
      load_box(target + panel * panel_bytes, map, panel * 64, token, head, shared.batch, barrier);
    }
  }

  // By one thread. From the last tile to the first, so that those with hidden keys come first.
  __device__ void produce() {
    const int key_head = shared.head / params.group, tiles = tile_count();
    load_panels(queries, kQueryPanel, maps.query, shared.first_row, shared.head, shared_address(&shared.queries));
    Position<kStages> at;
    for (bool first_run = true, again = true; again; first_run = false) {
      for (int tile = tiles - 1; tile >= 0; --tile) {
        const auto load = [&](Pipeline<kStages>& pipeline, std::uint32_t target, const CUtensorMap& map) {
          wait(shared_address(&pipeline.empty[at.stage]), at.parity ^ 1);
          load_panels(target + at.stage * Config::kTileBytes, kTilePanel, map, tile * kTileKeys, key_head,
                      shared_address(&pipeline.full[at.stage]));
        };
        load(shared.keys, keys, maps.key);
        load(shared.values, values, maps.value);
        at.advance();
      }
      if (!first_run) return;
      wait(shared_address(&shared.verdict), 0);
      again = shared.again;
    }
  }

  // ---- Consumers

  struct Consumer {
    ForwardBlock& block;
    int group;  // number of the consumer
    // The compiler must know these to be the same in all lanes, or it copies them into the warp's registers for every
    // product (10 % of the forward): they start as constants, and no loop stands around the one that advances them.
    Position<kStages> key_at, value_at;
    float scores[1][kKeyNTiles][4];
    float sums[1][kDimNTiles][4];
    float row_max[2], row_sum[2];

    __device__ Consumer(ForwardBlock& block) : block(block), group(static_cast<int>(threadIdx.x) / kWarpGroup - 1) {}

    // Of the block's tile of rows, and of a tile of keys (fragments.cuh).
    __device__ int warp_row() const { return static_cast<int>(threadIdx.x) / 32 % 4 * 16 + group * 64; }
    __device__ int row_of(int i) const { return warp_row() + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * i; }
    __device__ int column_of(int n) const { return 8 * n + 2 * (static_cast<int>(threadIdx.x) % 4); }

    __device__ void release(Pipeline<kStages>& pipeline, Position<kStages>& at) {
      if (threadIdx.x % kWarpGroup == 0) arrive(shared_address(&pipeline.empty[at.stage]));
      at.advance();
    }

    // scores = queries keys^T, under way
    __device__ void multiply_keys() {
      wait(shared_address(&block.shared.keys.full[key_at.stage]), key_at.parity);
      const std::uint64_t a = matrix_descriptor(block.queries + group * 64 * 128, 16, 1024);
      const std::uint64_t b =
          matrix_descriptor(block.keys + key_at.stage * static_cast<std::uint32_t>(Config::kTileBytes), 16, 1024);
      wgmma_fence();
#pragma unroll
      for (int depth = 0; depth < kHeadDim / 16; ++depth) {
        wgmma<Element, BRows::kColumns>(scores[0], advanced(a, depth / 4 * kQueryPanel + depth % 4 * 32),
                                        advanced(b, depth / 4 * kTilePanel + depth % 4 * 32), depth != 0);
      }
      wgmma_commit();
    }

    // sums += probabilities values, under way
    __device__ void add_values(const std::uint32_t (&probabilities)[kKeyNTiles / 2][4]) {
      wait(shared_address(&block.shared.values.full[value_at.stage]), value_at.parity);
      const std::uint64_t b = matrix_descriptor(
          block.values + value_at.stage * static_cast<std::uint32_t>(Config::kTileBytes), kTilePanel, 1024);
      wgmma_fence();
#pragma unroll
      for (int depth = 0; depth < kTileKeys / 16; ++depth) {
        wgmma<Element, BRows::kDepth>(sums[0], probabilities[depth], advanced(b, depth * 16 * 128), true);
      }
      wgmma_commit();
    }

    __device__ void pack_probabilities(std::uint32_t (&probabilities)[kKeyNTiles / 2][4]) const {
#pragma unroll
      for (int depth = 0; depth < kKeyNTiles / 2; ++depth)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = pair_at(scores, i % 2, 2 * depth + i / 2);
          probabilities[depth][i] = pack<Element>(pair[0], pair[1]);
        }
    }

    // Values of keys past the length may be anything, and 0 times NaN is NaN: in the one tile that has some they are
    // overwritten. By all consumers; `tile` is the first one.
    __device__ void clear_missing_values(int tile) {
      const int existing = block.shared.existing, first_key = tile * kTileKeys;
      if (existing == block.params.keys || existing >= first_key + kTileKeys) return;
      wait(shared_address(&block.shared.values.full[value_at.stage]), value_at.parity);
      const std::uint32_t tile_values = block.values + value_at.stage * static_cast<std::uint32_t>(Config::kTileBytes);
      constexpr int kPieces = Config::kPanels * 8;
      for (int index = static_cast<int>(threadIdx.x) - kWarpGroup; index < (first_key + kTileKeys - existing) * kPieces;
           index += kConsumers * kWarpGroup) {
        const int row = existing - first_key + index / kPieces, piece = index % kPieces;
        const std::uint32_t address = tile_values + piece / 8 * kTilePanel + row * 128 + piece % 8 * 16;
#pragma unroll
        for (int word = 0; word < 4; ++word) store_shared(address + 4 * word, 0);
      }
      fence_async_proxy();
      sync_named_barrier(kConsumersBarrier, kConsumers * kWarpGroup);
    }

    // Hides what the causal rule and the length hide.
    __device__ void hide(int tile) {
      const ForwardParams& params = block.params;
      const int existing = block.shared.existing, first_row = block.shared.first_row;
      if ((tile + 1) * kTileKeys <= causal_limit(params.visibility, existing, first_row)) return;
      hide_past_limits(
          scores,
          [&](int i) { return causal_limit(params.visibility, existing, first_row + row_of(i)) - tile * kTileKeys; },
          [&](int n) { return column_of(n); }, -INFINITY);
    }

    // At the tensor cores, so that one consumer multiplies while another exponentiates.
    __device__ void take_turn() {
      if (Config::kTakesTurns) sync_named_barrier(kTurnBarrier + group, 2 * kWarpGroup);
    }
    __device__ void pass_turn() {
      if (Config::kTakesTurns) arrive_named_barrier(kTurnBarrier + (group + 1) % kConsumers, 2 * kWarpGroup);
    }

    __device__ void begin() {
      clear(sums);
#pragma unroll
      for (int i = 0; i < 2; ++i) row_max[i] = -INFINITY, row_sum[i] = 0;
    }

    __device__ void wait_for_scores() {
      settle(scores[0]);
      release(block.shared.keys, key_at);
    }

    __device__ void wait_for_sums() {
      wgmma_wait<0>();
      settle(sums[0]);
      release(block.shared.values, value_at);
    }

    __device__ void run_over_tiles(int tiles) {
      const float multiplier = block.params.score.multiplier;
      if (tiles == 0) return;
      std::uint32_t probabilities[kKeyNTiles / 2][4];
      float rescale[2];
      multiply_keys();
      wgmma_wait<0>();
      wait_for_scores();
      hide(tiles - 1);
      clear_missing_values(tiles - 1);
      exponentiate_rows(multiplier, scores, row_max, row_sum, rescale);
      pack_probabilities(probabilities);
#pragma unroll 1
      for (int tile = tiles - 2; tile >= 0; --tile) {
        take_turn();
        multiply_keys();
        add_values(probabilities);
        pass_turn();
        wgmma_wait<1>();
        wait_for_scores();
        hide(tile);
        exponentiate_rows(multiplier, scores, row_max, row_sum, rescale);
        wait_for_sums();
        rescale_rows(rescale, sums);
        pack_probabilities(probabilities);
      }
      add_values(probabilities);
      wait_for_sums();
    }

    // The same for rows that may be huge (softmax.cuh), without haste.
    __device__ void run_safely_over_tiles(int tiles) {
      const ScoreRule& rule = block.params.score;
      std::uint32_t probabilities[kKeyNTiles / 2][4];
      float true_max[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
      for (int tile = tiles - 1; tile >= 0; --tile) {
        multiply_keys();
        wgmma_wait<0>();
        wait_for_scores();
        hide(tile);
        if (tile == tiles - 1) clear_missing_values(tile);
#pragma unroll
        for (int i = 0; i < 2; ++i) shift_huge_row(rule, i, true_max[i], scores, row_max, row_sum, sums);
        update_softmax(rule.multiplier, scores, row_max, row_sum, sums,
                       [&](int i) { return row_maximum(scores, i, row_max[i]); });
        pack_probabilities(probabilities);
        add_values(probabilities);
        wait_for_sums();
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) row_max[i] = true_max[i];
    }

    __device__ void store() const {
      const ForwardParams& params = block.params;
      const Shared& shared = block.shared;
      const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float sum = row_sum[i];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const bool empty = row_max[i] == -INFINITY && sum == 0;
        const float inverse = empty ? 0.0f : 1.0f / sum;
        const int row = shared.first_row + row_of(i);
        const bool exists = row < params.rows;
        if (lane % 4 == 0 && exists) {
          const std::int64_t index =
              (static_cast<std::int64_t>(shared.batch) * params.heads + shared.head) * params.rows + row;
          store_row_facts(params, index, row_max[i], sum * unrounded(params.score, row_max[i]));
        }
        auto* target = static_cast<std::uint16_t*>(params.out.data) + shared.batch * params.out.batch_stride +
                       shared.head * params.out.head_stride + row * params.out.token_stride;
#pragma unroll
        for (int first = 0; first < kDimNTiles; first += 4) {
          std::uint32_t words[4];
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const float* pair = pair_at(sums, i, first + n);
            words[n] = pack<Element>(pair[0] * inverse, pair[1] * inverse);
          }
          transpose_quad(words);
          if (exists) store_piece(target, first + lane % 4, words, params.head_dim, params.aligned);
        }
      }
    }
  };

  __device__ void consume() {
    Consumer consumer(*this);
    if (Config::kTakesTurns && consumer.group == kConsumers - 1) consumer.pass_turn();
    consumer.begin();
    wait(shared_address(&shared.queries), 0);
    const int tiles = tile_count();
    consumer.run_over_tiles(tiles);
    const bool huge = has_huge_row(params.score.multiplier, consumer.row_max, consumer.row_sum, consumer.sums);
    const bool again = any_at_named_barrier(kConsumersBarrier, kConsumers * kWarpGroup, huge);
    if (threadIdx.x == kWarpGroup) {
      shared.again = again;
      arrive(shared_address(&shared.verdict));
    }
    if (again) {
      consumer.begin();
      consumer.run_safely_over_tiles(tiles);
    }
    consumer.store();
  }
};

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(ForwardConfig<kHeadDim>::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardParams params, const __grid_constant__ ForwardMaps maps) {
  using Config = ForwardConfig<kHeadDim>;
  extern __shared__ __align__(1024) unsigned char memory[];
  ForwardBlock<Element, kHeadDim> block(params, maps, memory);
  if (threadIdx.x < kWarpGroup) {
    give_registers_up<Config::kProducerRegisters>();
    if (threadIdx.x == 0) block.produce();
  } else {
    take_registers<Config::kConsumerRegisters>();
    block.consume();
  }
}

}  // namespace flash_dmattn::internal::cuda::sm90
