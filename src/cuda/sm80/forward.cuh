// The sm80 forward: flash attention with mma.sync over the tiles of keys that a block of rows sees.
//
// One block owns kTileRows query rows of one head. Keys and values come in tiles by cp.async: while scores are computed
// from a tile of keys its values arrive, and while the values are used the next keys arrive. Which tiles there are is
// arithmetic (causal rule and lengths only) or read from a plan, whose keys are gathered while they are copied.
#pragma once

#include "cuda/attention/block_order.cuh"
#include "cuda/attention/hide.cuh"
#include "cuda/attention/row_block.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tokens.cuh"
#include "cuda/attention/walk.cuh"
#include "cuda/attention/warp_gemm.cuh"
#include "cuda/ptx/dynamic_shared.cuh"
#include "cuda/sm80/forward_config.h"

namespace flash_dmattn::internal::cuda {

template <typename Element, int kHeadDim, int kValueDim, bool kPlanned, bool kRowBias, bool kNarrow>
struct ForwardBlock {
  using Config = ForwardConfig<kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow>;
  static constexpr int kTileKeys = Config::kTileKeys;
  static constexpr int kMTiles = Config::kWarpRows / 16;
  static constexpr int kNTiles = kTileKeys / 8;  // columns of a score fragment
  static constexpr int kDimNTiles = kValueDim / 8;
  static constexpr int kThreadRows = 2 * kMTiles;  // rows of which a thread holds parts
  using KeyTile = SharedTile<kHeadDim>;
  using ValueTile = SharedTile<kValueDim>;
  using Tiles = PlannedTiles<kPlanTileKeys, Config::kWords, Config::kWarps>;
  using Facts = typename Tiles::Facts;
  struct Shared : RowBlock {
    float bias[kPlanned || kRowBias ? 1 : kTileKeys];  // of the tile's keys
    float true_max[Config::kTileRows];                 // of rows, where kSafe
  };
  static constexpr std::size_t kSharedBytes =
      Config::kTileSharedBytes + sizeof(Shared) + (kPlanned ? sizeof(Tiles) : 0);

  const ForwardParams& params;
  KeyTile queries, keys;
  ValueTile values;
  Shared& shared;
  Tiles& planned;  // only in a plan
  float scores[kMTiles][kNTiles][4];
  float accumulators[kMTiles][kDimNTiles][4];
  float row_max[kThreadRows], row_sum[kThreadRows];

  __device__ ForwardBlock(const ForwardParams& params, int batch, int head, int first_row, unsigned char* memory)
      : params(params),
        queries{shared_address(memory)},
        keys{queries.address + static_cast<std::uint32_t>(Config::kQueryBytes)},
        values{keys.address + static_cast<std::uint32_t>(Config::kKeyBytes)},
        shared(*reinterpret_cast<Shared*>(memory + Config::kTileSharedBytes)),
        planned(*reinterpret_cast<Tiles*>(memory + Config::kTileSharedBytes + sizeof(Shared))) {
    if (threadIdx.x == 0) shared.set(params, kPlanned, batch, head, first_row);
    __syncthreads();
  }

  // Which rows of which head a block of the launch owns.
  struct Rows {
    int batch, head, first_row;

    __device__ Rows(const ForwardParams& params, unsigned block) {
      const int row_tiles = (params.rows + Config::kTileRows - 1) / Config::kTileRows;
      const int pair = static_cast<int>(block / static_cast<unsigned>(row_tiles));
      batch = pair / params.heads, head = pair % params.heads;
      // Under the causal rule the last rows see the most: they start first.
      first_row = (row_tiles - 1 - static_cast<int>(block % static_cast<unsigned>(row_tiles))) * Config::kTileRows;
    }
  };

  // For order_blocks: how many tiles the block's units visit.
  __device__ static int visits(const ForwardParams& params, unsigned block, int lane, int lanes) {
    constexpr int kUnits = Config::kTileRows < kUnitRows ? 1 : Config::kTileRows / kUnitRows;
    const Rows rows(params, block);
    const std::int64_t chunk = params.plan.first_chunk(rows.batch, rows.head) + rows.first_row / kChunkRows;
    const std::int32_t* units = params.plan.unit_tiles + chunk * kChunkUnits + rows.first_row % kChunkRows / kUnitRows;
    int visits = 0;
    for (int unit = lane; unit < kUnits; unit += lanes) visits += units[unit];
    return visits;
  }

  // Where registers are short, what depends on the thread is made anew wherever it is needed: kept, it would take some.
  static constexpr bool kKeepsOrigin = kHeadDim <= 128 && !(kRowBias && Config::kWarpRows == 32);
  __device__ static int thread_index() {
    return kKeepsOrigin ? static_cast<int>(threadIdx.x) : recomputed(static_cast<int>(threadIdx.x));
  }

  // For what is done seldom: not worth registers.
  __device__ static int fresh_thread_index() { return recomputed(static_cast<int>(threadIdx.x)); }

  // The warp's first row within the block.
  __device__ static int warp_row() {
    constexpr bool kShort = kHeadDim == 96 && !kPlanned;
    return (kShort ? fresh_thread_index() : thread_index()) / 32 * Config::kWarpRows;
  }

  struct Origin : RowBlockOrigin<Config::kWarpRows> {
    __device__ explicit Origin(int thread = thread_index()) : RowBlockOrigin<Config::kWarpRows>(thread) {}
  };

  __device__ void load_queries() const {
    const KeyTile tiles[] = {queries};
    const int first_row = shared.first_row;
    const TokenRows sources[] = {rows_of(params.query, shared.batch, shared.head, first_row)};
    load_rows<Config::kTileRows, kHeadDim, Config::kThreads>(
        thread_index(), tiles, sources, [&](int row) { return first_row + row < params.rows ? row : -1; },
        {params.head_dim}, params.aligned);
  }

  // `rows`: of keys or values, which have `columns`. `buffer`: where a plan's tile has its facts.
  template <int kDim>
  __device__ void load_tile(SharedTile<kDim> target, const TokenRows& rows, int columns, int tile, int buffer) const {
    const SharedTile<kDim> tiles[] = {target};
    const TokenRows sources[] = {rows};
    const int first_key = kPlanned && !needs_facts(tile) ? planned.first_key(tile) : -1;
    const int existing = kPlanned ? 0 : shared.existing;
    load_rows<kTileKeys, kDim, Config::kThreads>(
        thread_index(), tiles, sources,
        [&](int row) {
          if constexpr (kPlanned) return first_key >= 0 ? first_key + row : planned.facts[buffer].key[row];
          const int key = tile * kTileKeys + row;
          return key < existing ? key : -1;
        },
        {columns}, params.aligned);
  }

  // scores = queries keys^T
  __device__ void multiply_keys() {
    clear(scores);
    gemm_from_shared<Element, kHeadDim, Depth::kAlongRows, Depth::kAlongRows, Config::kKeyAhead>(scores, queries,
                                                                                                 warp_row(), keys, 0);
  }

  // Softcap and bias. `tile_or_buffer`: the tile, or in a plan the buffer of its facts.
  __device__ void transform_scores(int tile_or_buffer) {
    const Origin origin;
    const BroadcastView& bias = params.bias;
    if constexpr (kRowBias) {
      scale_products(params.score, scores);
      add_row_bias<Element>(
          bias, bias.offset(shared.batch, shared.head), params.rows, scores,
          [&](int i) { return shared.first_row + origin.row_of(i); },
          [&](int n, int pair) {
            const int column = origin.column_of(n) + pair;
            if constexpr (kPlanned) return planned.facts[tile_or_buffer].key[column];
            const int key = tile_or_buffer * kTileKeys + column;
            return key < shared.existing ? key : -1;
          });
    } else {
      cap_products(params.score, scores);
      if (!bias.defined()) return scale_by(params.score.outer_scale, scores);
      add_key_bias(params.score.outer_scale, scores, [&](int n) {
        const float* tile_bias = kPlanned ? planned.facts[tile_or_buffer].bias : shared.bias;
        return *reinterpret_cast<const float2*>(tile_bias + origin.column_of(n));
      });
    }
  }

  // Dense: leaves the bias of a tile's keys in shared memory, and asks for that of the tile after it.
  __device__ void load_key_bias(int tile) const {
    const BroadcastView& bias = params.bias;
    const int column = recomputed(static_cast<int>(threadIdx.x));
    if (kRowBias || !bias.defined() || column >= kTileKeys) return;
    const std::int64_t offset = bias.offset(shared.batch, shared.head);
    const int key = tile * kTileKeys + column;
    if (key >= kTileKeys) prefetch_bias(bias, offset + (key - kTileKeys) * bias.key_stride);
    shared.bias[column] = key < shared.existing ? load_bias<Element>(bias, offset + key * bias.key_stride) : 0.0f;
  }

  // Hides what the causal rule and the length hide.
  __device__ void hide_tile(int tile) {
    const Origin origin(fresh_thread_index());
    const int existing = shared.existing, first_row = shared.first_row;
    hide_past_limits(
        scores,
        [&](int i) {
          return causal_limit(params.visibility, existing, first_row + origin.row_of(i)) - tile * kTileKeys;
        },
        [&](int n) { return origin.column_of(n); }, -INFINITY);
  }

  __device__ const std::uint32_t* warp_words(const Facts& tile) const { return tile.words[warp_row() / kWordRows]; }

  // Only where the tiles are gone over once more (kSafe).
  __device__ void shift_huge_rows() {
    const Origin origin(fresh_thread_index());
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      float true_max = shared.true_max[origin.row_of(i)];
      shift_huge_row(params.score, i, true_max, scores, row_max, row_sum, accumulators);
      __syncwarp();
      if (origin.column == 0) shared.true_max[origin.row_of(i)] = true_max;
    }
  }

  // accumulators += probabilities values
  __device__ void add_values() {
    const float multiplier = params.score.multiplier;
    if constexpr (Config::kMixesSoftmax) {
      float reference[kThreadRows], tile_sum[kThreadRows] = {};
      rescale_sums(multiplier, scores, row_max, row_sum, accumulators, reference);
      gemm_from_registers<Element, Config::kValueAhead>(
          accumulators, scores, values, 0, [&](int depth, int part, int parts) {
            exponentiate(multiplier, reference, scores, tile_sum, 2 * depth, part, parts);
          });
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) row_sum[i] += tile_sum[i];
    } else {
      update_softmax(multiplier, scores, row_max, row_sum, accumulators,
                     [&](int i) { return row_maximum(scores, i, row_max[i]); });
      gemm_from_registers<Element, Config::kValueAhead>(accumulators, scores, values, 0);
    }
  }

  // Goes over the tiles once; and once more, by code of its own (kSafe), if that shows a row to be huge. So the loop
  // that nearly always suffices does nothing about huge rows.
  __device__ void run() {
    run_over_tiles<false>();
    // Without any tile the barrier is needed, too: store() puts results where queries may still be arriving.
    if (__syncthreads_or(has_huge_reference(params.score.multiplier, row_max, row_sum) ||
                         has_infinite_sum(accumulators))) {
      run_over_tiles<true>();
      const Origin origin(fresh_thread_index());
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) row_max[i] = shared.true_max[origin.row_of(i)];
      __syncthreads();
    }
    store();
  }

  template <bool kSafe>
  __device__ void run_over_tiles() {
    begin<kSafe>();
    if constexpr (kPlanned) {
      run_planned<kSafe>();
    } else {
      run_dense<kSafe>();
    }
    wait_copies<0>();
  }

  template <bool kSafe>
  __device__ void begin() {
    clear(accumulators);
    const Origin origin(fresh_thread_index());
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      row_max[i] = -INFINITY, row_sum[i] = 0;
      if constexpr (kSafe) shared.true_max[origin.row_of(i)] = -INFINITY;
    }
  }

  __device__ void store() {
    const Origin origin(fresh_thread_index());
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int batch = shared.batch, head = shared.head, first_row = shared.first_row;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      float sum = row_sum[i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const bool empty = row_max[i] == -INFINITY && sum == 0;
      const float inverse = empty ? 0.0f : 1.0f / sum_with_sink<Element>(params, head, row_max[i], sum);
      const int row = first_row + origin.row_of(i);
      if (lane % 4 == 0 && row < params.rows) {
        const std::int64_t index = (static_cast<std::int64_t>(batch) * params.heads + head) * params.rows + row;
        store_row_facts(params, index, row_max[i], sum * unrounded(params.score, row_max[i]));
      }
#pragma unroll
      for (int n = 0; n < kDimNTiles; ++n) {
        const float* pair = pair_at(accumulators, i, n);
        store_shared(queries.piece(origin.row_of(i), n) + 4 * (lane % 4),
                     pack<Element>(pair[0] * inverse, pair[1] * inverse));
      }
    }
    __syncwarp();  // the warp's queries, and now results, are its own
    auto* base =
        static_cast<std::uint16_t*>(params.out.data) + batch * params.out.batch_stride + head * params.out.head_stride;
    for (int index = lane; index < Config::kWarpRows * ValueTile::kPieces; index += 32) {
      const int row = warp_row() + index / ValueTile::kPieces, piece = index % ValueTile::kPieces;
      if (first_row + row >= params.rows) continue;
      std::uint32_t words[4];
      load_shared_16(words, queries.piece(row, piece));
      store_piece(base + (first_row + row) * params.out.token_stride, piece, words, params.value_dim, params.aligned);
    }
  }

  template <bool kSafe>
  __device__ void run_dense() {
    const int first_row = shared.first_row, last_row = min(first_row + Config::kTileRows, params.rows) - 1;
    const int limit = causal_limit(params.visibility, shared.existing, last_row);
    // Tiles from here on hold keys that some row must not see.
    const int first_limit = causal_limit(params.visibility, shared.existing, first_row);
    load_queries();
    // From the last to the first, so that those with hidden keys come first.
    int tile = (limit + kTileKeys - 1) / kTileKeys - 1;
    if (tile >= 0) load_tile(keys, shared.keys, params.head_dim, tile, 0);
    if (tile >= 0) load_key_bias(tile);
    commit_copies();
    for (; tile >= 0; --tile) {
      const TokenRows value_rows = shared.values;  // read while the block waits
      wait_copies<0>();
      __syncthreads();
      load_tile(values, value_rows, params.value_dim, tile, 0);
      commit_copies();
      multiply_keys();
      if (params.score.transforms) transform_scores(tile);
      if ((tile + 1) * kTileKeys > first_limit) hide_tile(tile);
      if constexpr (kSafe) shift_huge_rows();
      const TokenRows key_rows = shared.keys;
      wait_copies<0>();
      __syncthreads();
      if (tile > 0) load_tile(keys, key_rows, params.head_dim, tile - 1, 0);
      commit_copies();
      add_values();
      if (tile > 0) load_key_bias(tile - 1);
    }
  }

  __device__ int next_planned(int* cursor) { return planned.next(params.plan, shared.chunk, cursor); }

  // Whether the warp's rows see any of the tile's keys, and whether they see all.
  __device__ void look_at_words(const Facts& facts, bool* any, bool* all) const {
    const std::uint32_t warp_rows = Config::kWarpRows == 32 ? ~0u : 0xffffu << (warp_row() % kWordRows);
    std::uint32_t some = 0, every = ~0u;
#pragma unroll
    for (int key = static_cast<int>(threadIdx.x) % 32; key < kTileKeys; key += 32) {
      some |= warp_words(facts)[key];
      every &= warp_words(facts)[key];
    }
    *any = __any_sync(~0u, (some & warp_rows) != 0);
    *all = __all_sync(~0u, (every & warp_rows) == warp_rows);
  }

  template <bool kSafe>
  __device__ void run_planned() {
    planned.template start<Element, kRowBias, Config::kTileRows>(params, shared.chunk, shared.batch, shared.head,
                                                                 shared.first_row);
    load_queries();
    // The tile that is computed, and the next two.
    int cursor = 0;
    int tile = next_planned(&cursor), ahead = next_planned(&cursor), far_ahead = next_planned(&cursor);
    typename Tiles::InFlight flight = planned.template make_first_facts<Element>(
        params, shared.chunk, tile, ahead, far_ahead, shared.existing, shared.first_row);
    if (tile >= 0) load_tile(keys, shared.keys, params.head_dim, tile, 0);
    commit_copies();
    for (int buffer = 0; tile >= 0; buffer ^= 1) {
      const Facts& facts = planned.facts[buffer];
      const TokenRows value_rows = shared.values;
      wait_copies<0>();
      __syncthreads();
      load_tile(values, value_rows, params.value_dim, tile, buffer);
      commit_copies();
      bool sees_any = true, sees_all = true;
      if (!is_full(tile)) look_at_words(facts, &sees_any, &sees_all);
      if (sees_any) {
        multiply_keys();
        if (params.score.transforms) transform_scores(buffer);
        if (!sees_all) {
          const Origin origin;
          hide_by_words(
              scores, warp_words(facts), warp_row() % kWordRows, [&](int n) { return origin.column_of(n); }, -INFINITY);
        }
        if constexpr (kSafe) shift_huge_rows();
      }
      planned.make_facts(params.visibility, flight, ahead, buffer ^ 1, shared.existing, shared.first_row);
      tile = ahead;
      ahead = far_ahead;
      far_ahead = next_planned(&cursor);  // read while the block waits, as is what follows
      const TokenRows key_rows = shared.keys;
      wait_copies<0>();
      __syncthreads();
      if (tile >= 0) load_tile(keys, key_rows, params.head_dim, tile, buffer ^ 1);
      if (needs_facts(ahead & far_ahead)) {  // either of the two: the mark kDirectTile is not in both
        flight = planned.template request_facts<Element>(params, ahead, shared.existing);
        planned.request_index(params.plan, shared.chunk, far_ahead);
      }
      commit_copies();
      if (sees_any) add_values();
    }
  }
};

template <typename Element, int kHeadDim, int kValueDim, bool kPlanned, bool kRowBias, bool kNarrow>
__global__ void __launch_bounds__(ForwardConfig<kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow>::kThreads,
                                  ForwardConfig<kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow>::kBlocksPerProcessor)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  unsigned char* shared = dynamic_shared_panels();
  using Block = ForwardBlock<Element, kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow>;
  const typename Block::Rows rows(params, kPlanned ? ordered_block(params.order) : blockIdx.x);
  Block block(params, rows.batch, rows.head, rows.first_row, shared);
  block.run();
}

}  // namespace flash_dmattn::internal::cuda
