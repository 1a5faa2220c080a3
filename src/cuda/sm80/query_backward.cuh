// Gradients of queries, and of a bias with rows of its own, by a pass of their own in which a block owns rows: every
// sum has one owner and one order, so that repeated runs give the same bits. Two products are computed once more than
// backward.cuh needs.
#pragma once

#include "cuda/attention/hide.cuh"
#include "cuda/attention/large_rows.cuh"
#include "cuda/attention/row_block.cuh"
#include "cuda/attention/tokens.cuh"
#include "cuda/attention/walk.cuh"
#include "cuda/attention/warp_gemm.cuh"
#include "cuda/ptx/dynamic_shared.cuh"
#include "cuda/sm80/query_backward_config.h"
#include "cuda/sm80/row_pairs.cuh"

namespace flash_dmattn::internal::cuda {

template <typename Element, int kHeadDim, int kValueDim, bool kPlanned, bool kRowBias, bool kNarrow>
struct QueryBackwardBlock {
  using Config = QueryBackwardConfig<kHeadDim, kValueDim, kNarrow>;
  static constexpr int kTileKeys = Config::kTileKeys;
  static constexpr int kMTiles = Config::kWarpRows / 16, kThreadRows = 2 * kMTiles;
  static constexpr int kNTiles = Config::kPartKeys / 8, kDimNTiles = kHeadDim / 8;
  using KeyTile = SharedTile<kHeadDim>;
  using ValueTile = SharedTile<kValueDim>;
  using Tiles = PlannedTiles<kTileKeys, Config::kWords, Config::kWarps>;
  using Facts = typename Tiles::Facts;
  static constexpr std::size_t kSharedBytes =
      Config::kTileSharedBytes + sizeof(RowBlock) + (kPlanned ? sizeof(Tiles) : 0);

  const BackwardParams& params;
  KeyTile queries;
  ValueTile output_gradients;
  RowBlock& shared;
  Tiles& planned;  // only in a plan
  float scores[kMTiles][kNTiles][4], gradients[kMTiles][kNTiles][4];
  float dqueries[kMTiles][kDimNTiles][4];
  float row_lse[kThreadRows], row_delta[kThreadRows];  // RowFacts of the thread's rows
  bool has_large_row = false;                          // any of the warp's

  __device__ QueryBackwardBlock(const BackwardParams& params, int batch, int head, int first_row, unsigned char* memory)
      : params(params),
        queries{shared_address(memory)},
        output_gradients{queries.address + static_cast<std::uint32_t>(Config::kQueryBytes)},
        shared(*reinterpret_cast<RowBlock*>(memory + Config::kTileSharedBytes)),
        planned(*reinterpret_cast<Tiles*>(memory + Config::kTileSharedBytes + sizeof(RowBlock))) {
    if (threadIdx.x == 0) shared.set(params, kPlanned, batch, head, first_row);
    __syncthreads();
  }

  __device__ KeyTile keys(int stage) const {
    return {output_gradients.address + static_cast<std::uint32_t>(Config::kOutputGradientBytes +
                                                                  stage * (Config::kKeyBytes + Config::kValueBytes))};
  }
  __device__ ValueTile values(int stage) const {
    return {keys(stage).address + static_cast<std::uint32_t>(Config::kKeyBytes)};
  }

  // The warp's first row within the block. Made anew wherever it is needed, as Origin: kept, they would take registers.
  __device__ static int warp_row() { return recomputed(static_cast<int>(threadIdx.x)) / 32 * Config::kWarpRows; }

  struct Origin : RowBlockOrigin<Config::kWarpRows> {
    __device__ Origin() : RowBlockOrigin<Config::kWarpRows>(recomputed(static_cast<int>(threadIdx.x))) {}
  };

  // Of one of the block's rows: tiles of facts are not those of this block. Its delta comes params.row_tile later.
  __device__ static const RowFacts* row_facts_of(const BackwardParams& params, const RowBlock& shared, int row) {
    const std::int64_t padded_rows = (params.rows + params.row_tile - 1) / params.row_tile * params.row_tile;
    return params.row_facts + 2 * (static_cast<std::int64_t>(shared.batch) * params.heads + shared.head) * padded_rows +
           row_fact(shared.first_row + row, params.row_tile);
  }

  __device__ void read_row_facts() {
    const Origin origin;
    const int rows = params.rows - shared.first_row;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const bool exists = origin.row_of(i) < rows;
      const RowFacts* fact = row_facts_of(params, shared, origin.row_of(i));
      row_lse[i] = exists ? fact[0] : INFINITY;
      row_delta[i] = exists ? fact[params.row_tile] : 0;
      has_large_row |= is_large_row(row_lse[i]);
    }
    has_large_row = __any_sync(~0u, has_large_row);
  }

  // Once a block, and not inlined: among the rest it made the compiler keep the loop's registers in memory.
  __device__ static __noinline__ void load_row_tiles(const BackwardParams& params, const RowBlock& shared,
                                                     KeyTile queries, ValueTile output_gradients) {
    const int batch = shared.batch, head = shared.head, first_row = shared.first_row;
    const TokenRows sources[] = {rows_of(params.query, batch, head, first_row),
                                 rows_of(params.dout, batch, head, first_row)};
    load_row_pairs<Config::kTileRows, Config::kThreads>(
        static_cast<int>(threadIdx.x), queries, output_gradients, sources,
        [&](int row) {
          return first_row + row < params.rows && *row_facts_of(params, shared, row) != INFINITY ? row : -1;
        },
        {params.head_dim, params.value_dim}, params.aligned);
  }

  // `tile_or_buffer`: the tile, or in a plan the buffer of its facts.
  __device__ int key_at(int tile_or_buffer, int column) const {
    if constexpr (kPlanned) return planned.facts[tile_or_buffer].key[column];
    const int key = tile_or_buffer * kTileKeys + column;
    return key < shared.existing ? key : -1;
  }

  __device__ void load_tile(int tile, int tile_or_buffer, int stage) const {
    const TokenRows sources[] = {shared.keys, shared.values};
    const int first_key = kPlanned && !needs_facts(tile) ? planned.first_key(tile) : -1;
    load_row_pairs<kTileKeys, Config::kThreads>(
        static_cast<int>(threadIdx.x), keys(stage), values(stage), sources,
        [&](int row) { return first_key >= 0 ? first_key + row : key_at(tile_or_buffer, row); },
        {params.head_dim, params.value_dim}, params.aligned);
  }

  __device__ void multiply_keys(int stage, int first_column) {
    clear(scores);
    gemm_from_shared<Element, kHeadDim, Depth::kAlongRows, Depth::kAlongRows>(scores, queries, warp_row(), keys(stage),
                                                                              first_column);
  }

  __device__ void transform_scores(int tile_or_buffer, int first_column) {
    const BroadcastView& bias = params.bias;
    const Origin origin;
    const std::int64_t offset = bias.offset(shared.batch, shared.head);
    const auto key_of = [&](int n, int pair) {
      return key_at(tile_or_buffer, first_column + origin.column_of(n) + pair);
    };
    if constexpr (kRowBias) {
      scale_products(params.score, scores);
      add_row_bias<Element>(
          bias, offset, params.rows, scores, [&](int i) { return shared.first_row + origin.row_of(i); }, key_of);
    } else {
      cap_products(params.score, scores);
      if (!bias.defined()) return scale_by(params.score.outer_scale, scores);
      add_key_bias(params.score.outer_scale, scores, [&](int n) {
        if constexpr (kPlanned) {
          return *reinterpret_cast<const float2*>(
              &planned.facts[tile_or_buffer].bias[first_column + origin.column_of(n)]);
        }
        const auto read = [&](int key) {
          return key < 0 ? 0.0f : load_bias<Element>(bias, offset + key * bias.key_stride);
        };
        return make_float2(read(key_of(n, 0)), read(key_of(n, 1)));
      });
    }
  }

  __device__ void hide(int tile_or_buffer, int first_column, bool full) {
    const Origin origin;
    const auto column = [&](int n) { return first_column + origin.column_of(n); };
    if constexpr (kPlanned) {
      if (full) return;
      const int row = warp_row();
      hide_by_words(scores, planned.facts[tile_or_buffer].words[row / kWordRows], row % kWordRows, column, -INFINITY);
    } else {
      const auto limit_of = [&](int i) {
        return causal_limit(params.visibility, shared.existing, shared.first_row + origin.row_of(i)) -
               tile_or_buffer * kTileKeys;
      };
      if (limit_of(0) < kTileKeys) hide_past_limits(scores, limit_of, column, -INFINITY);
    }
  }

  // Of large rows scores become their distances from lse.
  __device__ void subtract_large_rows() {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const Origin origin;
      const int row = shared.first_row + origin.row_of(i);
      if (is_large_row(row_lse[i])) subtract_large_lse(params, shared.batch, shared.head, row, i, scores);
    }
  }

  // No other block adds to these entries.
  __device__ void add_bias_gradients(int tile_or_buffer, int first_column) const {
    const Origin origin;
    const BroadcastView& dbias = params.dbias;
    float* target = params.dbias_sums + dbias.offset(shared.batch, shared.head);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int row = shared.first_row + origin.row_of(i);
      float sum = 0;
      for_each_in_row(gradients, i, [&](int n, int pair, float gradient) {
        const int key = key_at(tile_or_buffer, first_column + origin.column_of(n) + pair);
        if (dbias.keys == 1) {
          sum += gradient;
        } else if (key >= 0 && row < params.rows) {
          target[row * dbias.row_stride + key * dbias.key_stride] += gradient;
        }
      });
      if (dbias.keys != 1) continue;
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (origin.column == 0 && row < params.rows) target[row * dbias.row_stride] += sum;
    }
  }

  // `full`: in a plan, every row sees every key.
  __device__ void run_tile(int tile_or_buffer, int stage, bool full = false) {
#pragma unroll 1
    for (int first_column = 0; first_column < kTileKeys; first_column += Config::kPartKeys) {
      run_part(tile_or_buffer, stage, first_column, full);
    }
  }

  // The keys of a tile from first_column on.
  __device__ void run_part(int tile_or_buffer, int stage, int first_column, bool full) {
    multiply_keys(stage, first_column);
    if (params.score.transforms) transform_scores(tile_or_buffer, first_column);
    hide(tile_or_buffer, first_column, full);
    if (has_large_row) subtract_large_rows();
    clear(gradients);
    gemm_from_shared<Element, kValueDim, Depth::kAlongRows, Depth::kAlongRows>(gradients, output_gradients, warp_row(),
                                                                               values(stage), first_column);
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const int at = 2 * (i % 2) + pair;
          const float score = scores[i / 2][n][at];
          const float probability = exp2_fast(fmaf(score, params.score.multiplier, -row_lse[i]));
          float& gradient = gradients[i / 2][n][at];
          gradient = score == -INFINITY ? 0 : probability * (gradient - row_delta[i]);  // not NaN where nothing is seen
        }
    if (kRowBias && params.dbias_sums != nullptr) add_bias_gradients(tile_or_buffer, first_column);
    if (params.score.softcap != 0) {
      // Once more, since the capped scores are gone: there are no registers to keep them in.
      multiply_keys(stage, first_column);
      scale_products(params.score, scores);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) gradients[m][n][i] *= softcap_derivative(params.score, scores[m][n][i]);
    }
    gemm_from_registers<Element>(dqueries, gradients, keys(stage), first_column);
  }

  __device__ void run_dense() {
    const int last_row = min(shared.first_row + Config::kTileRows, params.rows) - 1;
    const int tiles = (causal_limit(params.visibility, shared.existing, last_row) + kTileKeys - 1) / kTileKeys;
    if (tiles > 0) load_tile(0, 0, 0);
    commit_copies();
    clear(dqueries);
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = Config::kStages == 2 ? tile % 2 : 0;
      wait_copies<0>();
      __syncthreads();
      if (Config::kStages == 2 && tile + 1 < tiles) load_tile(tile + 1, tile + 1, stage ^ 1);
      commit_copies();
      run_tile(tile, stage);
      if (Config::kStages == 1) {
        __syncthreads();
        if (tile + 1 < tiles) load_tile(tile + 1, tile + 1, 0);
        commit_copies();
      }
    }
  }

  __device__ int next_planned(int* cursor) { return planned.next(params.plan, shared.chunk, cursor); }

  // As in forward.cuh.
  __device__ void run_planned() {
    planned.template start<Element, kRowBias, Config::kTileRows>(params, shared.chunk, shared.batch, shared.head,
                                                                 shared.first_row);
    int cursor = 0;
    int tile = next_planned(&cursor), ahead = next_planned(&cursor), far_ahead = next_planned(&cursor);
    typename Tiles::InFlight flight = planned.template make_first_facts<Element>(
        params, shared.chunk, tile, ahead, far_ahead, shared.existing, shared.first_row);
    if (tile >= 0) load_tile(tile, 0, 0);
    commit_copies();
    clear(dqueries);
    for (int buffer = 0; tile >= 0; buffer ^= 1) {
      const int stage = Config::kStages == 2 ? buffer : 0;
      wait_copies<0>();
      planned.make_facts(params.visibility, flight, ahead, buffer ^ 1, shared.existing, shared.first_row);
      __syncthreads();
      const int next = next_planned(&cursor);
      if (Config::kStages == 2 && ahead >= 0) load_tile(ahead, buffer ^ 1, stage ^ 1);
      flight = planned.template request_facts<Element>(params, far_ahead, shared.existing);
      planned.request_index(params.plan, shared.chunk, next);
      commit_copies();
      run_tile(buffer, stage, is_full(tile));
      __syncthreads();
      if (Config::kStages == 1) {
        if (ahead >= 0) load_tile(ahead, buffer ^ 1, 0);
        commit_copies();
      }
      tile = ahead;
      ahead = far_ahead;
      far_ahead = next;
    }
  }

  __device__ void store() const {
    const Origin origin;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int batch = shared.batch, head = shared.head, first_row = shared.first_row;
    const std::uint32_t lane_bytes = 2 * origin.column;
    for_each_pair(dqueries, [&](int i, int n, const float* pair) {
      store_shared(queries.piece(origin.row_of(i), n) + lane_bytes,
                   pack<Element>(pair[0] * params.score.scale, pair[1] * params.score.scale));
    });
    __syncwarp();  // a warp's queries, and now results, are its own
    auto* base = static_cast<std::uint16_t*>(params.dquery.data) + batch * params.dquery.batch_stride +
                 head * params.dquery.head_stride;
    for (int index = lane; index < Config::kWarpRows * KeyTile::kPieces; index += 32) {
      const int row = warp_row() + index / KeyTile::kPieces, piece = index % KeyTile::kPieces;
      if (first_row + row >= params.rows) continue;
      std::uint32_t words[4];
      load_shared_16(words, queries.piece(row, piece));
      store_piece(base + (first_row + row) * params.dquery.token_stride, piece, words, params.head_dim, params.aligned);
    }
  }

  __device__ void run() {
    read_row_facts();
    load_row_tiles(params, shared, queries, output_gradients);
    commit_copies();
    if constexpr (kPlanned) {
      run_planned();
    } else {
      run_dense();
    }
    wait_copies<0>();
    __syncthreads();
    if (params.dquery.defined()) store();
  }
};

// One block a tile of rows of a head; where several heads or batch elements (entry_heads, entry_batches) add to
// the same entries of a bias gradient, the block takes them one after another, since it alone owns its rows of that
// gradient.
template <typename Element, int kHeadDim, int kValueDim, bool kPlanned, bool kRowBias, bool kNarrow>
__global__ void __launch_bounds__(QueryBackwardConfig<kHeadDim, kValueDim, kNarrow>::kThreads,
                                  QueryBackwardConfig<kHeadDim, kValueDim, kNarrow>::kBlocksPerProcessor)
    query_backward_kernel(const __grid_constant__ BackwardParams params, int entry_batches, int entry_heads) {
  using Config = QueryBackwardConfig<kHeadDim, kValueDim, kNarrow>;
  unsigned char* shared = dynamic_shared_panels();
  const int row_tiles = (params.rows + Config::kTileRows - 1) / Config::kTileRows;
  const int row_tile = row_tiles - 1 - static_cast<int>(blockIdx.x % static_cast<unsigned>(row_tiles));
  const int owner = static_cast<int>(blockIdx.x / static_cast<unsigned>(row_tiles));
  using Block = QueryBackwardBlock<Element, kHeadDim, kValueDim, kPlanned, kRowBias, kNarrow>;
  if constexpr (!kRowBias) {
    Block(params, owner / params.heads, owner % params.heads, row_tile * Config::kTileRows, shared).run();
    return;
  }
  const int head_owners = params.heads / entry_heads;
  for (int batch = owner / head_owners * entry_batches, batches = entry_batches; batches > 0; ++batch, --batches) {
    for (int head = owner % head_owners * entry_heads, heads = entry_heads; heads > 0; ++head, --heads) {
      Block(params, batch, head, row_tile * Config::kTileRows, shared).run();
      __syncthreads();
    }
  }
}

}  // namespace flash_dmattn::internal::cuda
