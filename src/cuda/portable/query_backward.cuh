// Gradients of queries, and of a bias with rows of its own, by a pass of their own in which a block owns rows: every
// sum has one owner and one order, so that repeated runs give the same bits. Two products are computed once more than
// backward.cuh needs.
#pragma once

#include "cuda/portable/hide.cuh"
#include "cuda/portable/query_backward_config.h"
#include "cuda/portable/tokens.cuh"
#include "cuda/portable/walk.cuh"
#include "cuda/ptx/block_product.cuh"

namespace flash_dmattn::internal::cuda {

template <typename Element, int kHeadDim, bool kPlanned, bool kRowBias>
struct QueryBackwardBlock {
  using Config = QueryBackwardConfig<kHeadDim, kPlanned>;
  static constexpr int kTileKeys = Config::kTileKeys;
  static constexpr int kMTiles = Config::kWarpRows / 16, kThreadRows = 2 * kMTiles;
  static constexpr int kNTiles = Config::kPartKeys / 8, kDimTiles = kHeadDim / 8;
  using Tile = SharedTile<kHeadDim>;
  using Tiles = PlannedTiles<kTileKeys, Config::kWords, Config::kWarps>;
  using Facts = typename Tiles::Facts;

  const BackwardParams& params;
  int batch, head, key_head, first_row, existing, chunk;
  int warp, lane;
  Tile queries, output_gradients;
  Tiles& planned;  // only in a plan
  float scores[kMTiles][kNTiles][4], gradients[kMTiles][kNTiles][4];
  float sums[kMTiles][kDimTiles][4];
  RowFacts facts[kThreadRows];  // of the thread's rows

  __device__ QueryBackwardBlock(const BackwardParams& params, int batch, int head, int first_row, unsigned char* shared)
      : params(params),
        batch(batch),
        head(head),
        key_head(head / params.group),
        first_row(first_row),
        existing(key_count(params.visibility, batch)),
        chunk(kPlanned ? static_cast<int>(params.plan.first_chunk(batch, head)) + first_row / kChunkRows : 0),
        warp(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        queries{shared_address(shared)},
        output_gradients{queries.address + static_cast<std::uint32_t>(Config::kRowBytes)},
        planned(*reinterpret_cast<Tiles*>(shared + 2 * Config::kRowBytes + Config::kStages * 2 * Config::kTileBytes)) {
    static_assert(!kPlanned || sizeof(Tiles) <= Config::kPlanBytes);
    clear(sums);
  }

  __device__ Tile keys(int stage) const {
    return {output_gradients.address + static_cast<std::uint32_t>(Config::kRowBytes + stage * 2 * Config::kTileBytes)};
  }
  __device__ Tile values(int stage) const {
    return {keys(stage).address + static_cast<std::uint32_t>(Config::kTileBytes)};
  }

  __device__ int row_of(int i) const { return warp * Config::kWarpRows + i * 8 + lane / 4; }
  __device__ int column_of(int n) const { return n * 8 + 2 * (lane % 4); }

  __device__ void load_row_tiles() {
    const std::int64_t padded_rows = (params.rows + params.row_tile - 1) / params.row_tile * params.row_tile;
    const RowFacts* source = params.row_facts + (static_cast<std::int64_t>(batch) * params.heads + head) * padded_rows;
    const auto facts_of = [&](int row) {
      return first_row + row < params.rows ? source[first_row + row] : make_float2(INFINITY, 0);
    };
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) facts[i] = facts_of(row_of(i));
    const Tile tiles[] = {queries, output_gradients};
    const TokenRows sources[] = {rows_of(params.query, head, first_row), rows_of(params.dout, head, first_row)};
    load_rows<Config::kRows, kHeadDim, Config::kThreads>(
        tiles, sources, [&](int row) { return facts_of(row).x != INFINITY ? row : -1; }, params.head_dim,
        params.aligned);
  }

  __device__ TokenRows rows_of(const TokenView& tokens, int token_head, int first) const {
    return {static_cast<const std::uint16_t*>(tokens.data) + recomputed(batch) * tokens.batch_stride +
                recomputed(token_head) * tokens.head_stride + first * tokens.token_stride,
            tokens.token_stride};
  }

  // `tile` is a buffer of facts in a plan, else the position.
  __device__ int key_at(int tile, int place) const {
    if constexpr (kPlanned) return planned.facts[tile].key[place];
    const int key = tile * kTileKeys + place;
    return key < existing ? key : -1;
  }

  __device__ void load_tile(int tile, int stage) const {
    const Tile tiles[] = {keys(stage), values(stage)};
    const TokenRows sources[] = {rows_of(params.key, key_head, 0), rows_of(params.value, key_head, 0)};
    load_rows<kTileKeys, kHeadDim, Config::kThreads>(
        tiles, sources, [&](int row) { return key_at(tile, row); }, params.head_dim, params.aligned);
  }

  __device__ void multiply_keys(int stage, int first_column) {
    clear(scores);
    multiply_blocks<Element, kHeadDim, Depth::kAlongRows, Depth::kAlongRows>(scores, queries, warp * Config::kWarpRows,
                                                                             keys(stage), first_column);
  }

  __device__ void transform_scores(int tile, int first_column) {
    scale_products(params.score, scores);
    const BroadcastView& bias = params.bias;
    if (!bias.defined()) return;
    const std::int64_t offset = bias.offset(batch, head);
    const auto key_of = [&](int n, int pair) { return key_at(tile, first_column + column_of(n) + pair); };
    if constexpr (kRowBias) {
      add_row_bias<Element>(bias, offset, params.rows, scores, [&](int i) { return first_row + row_of(i); }, key_of);
    } else {
      add_key_bias(scores, [&](int n) {
        if constexpr (kPlanned) {
          return *reinterpret_cast<const float2*>(&planned.facts[tile].bias[first_column + column_of(n)]);
        }
        const auto read = [&](int key) {
          return key < 0 ? 0.0f : kLog2E * load_bias<Element>(bias, offset + key * bias.key_stride);
        };
        return make_float2(read(key_of(n, 0)), read(key_of(n, 1)));
      });
    }
  }

  __device__ void hide(int tile, int first_column, bool full) {
    const auto column = [&](int n) { return first_column + column_of(n); };
    if constexpr (kPlanned) {
      if (full) return;
      const int row = warp * Config::kWarpRows;
      hide_by_words(scores, planned.facts[tile].words[row / kWordRows], row % kWordRows, column, -INFINITY);
    } else {
      const auto limit_of = [&](int i) {
        return causal_limit(params.visibility, existing, first_row + row_of(i)) - tile * kTileKeys;
      };
      if (limit_of(0) < kTileKeys) hide_past_limits(scores, limit_of, column, -INFINITY);
    }
  }

  // Adds to places that no other block adds to.
  __device__ void add_bias_gradients(int tile, int first_column) const {
    const BroadcastView& dbias = params.dbias;
    float* place = params.dbias_sums + dbias.offset(batch, head);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int row = first_row + row_of(i);
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const int key = key_at(tile, first_column + column_of(n) + pair);
          const float gradient = gradients[i / 2][n][2 * (i % 2) + pair];
          if (dbias.keys == 1) {
            sum += gradient;
          } else if (key >= 0 && row < params.rows) {
            place[row * dbias.row_stride + key * dbias.key_stride] += gradient;
          }
        }
      if (dbias.keys != 1) continue;
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (lane % 4 == 0 && row < params.rows) place[row * dbias.row_stride] += sum;
    }
  }

  // `full`: in a plan, every row sees every key.
  __device__ void run_tile(int tile, int stage, bool full = false) {
#pragma unroll 1
    for (int first_column = 0; first_column < kTileKeys; first_column += Config::kPartKeys) {
      run_part(tile, stage, first_column, full);
    }
  }

  // The keys of a tile from first_column on.
  __device__ void run_part(int tile, int stage, int first_column, bool full) {
    multiply_keys(stage, first_column);
    if (params.score.transforms) transform_scores(tile, first_column);
    hide(tile, first_column, full);
    clear(gradients);
    multiply_blocks<Element, kHeadDim, Depth::kAlongRows, Depth::kAlongRows>(
        gradients, output_gradients, warp * Config::kWarpRows, values(stage), first_column);
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const int at = 2 * (i % 2) + pair;
          const float probability = exp2_fast(fmaf(scores[i / 2][n][at], params.score.multiplier, -facts[i].x));
          float& gradient = gradients[i / 2][n][at];
          gradient = probability == 0 ? 0 : probability * (gradient - facts[i].y);  // not NaN where nothing is seen
        }
    if (kRowBias && params.dbias_sums != nullptr) add_bias_gradients(tile, first_column);
    if (params.score.softcap_log2 != 0) {
      // Once more, since the capped scores are gone: there are no registers to keep them in.
      multiply_keys(stage, first_column);
      scale_products(params.score, scores);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int n = 0; n < kNTiles; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float ratio = scores[m][n][i] * params.score.inverse_softcap_log2;
            gradients[m][n][i] *= 1 - ratio * ratio;
          }
    }
    multiply_gradients(stage, first_column);
  }

  // sums += score gradients x keys
  __device__ void multiply_gradients(int stage, int first_key) {
    const int any_lane = recomputed(lane);
    const std::uint32_t key_lane =
        keys(stage).lane_address(first_key + row_major_lane_row(any_lane), row_major_lane_half(any_lane));
#pragma unroll
    for (int depth = 0; depth < Config::kPartKeys / 16; ++depth) {
      std::uint32_t a[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        const float(&left)[4] = gradients[m][2 * depth];
        const float(&right)[4] = gradients[m][2 * depth + 1];
        a[m][0] = pack<Element>(left[0], left[1]);
        a[m][1] = pack<Element>(left[2], left[3]);
        a[m][2] = pack<Element>(right[0], right[1]);
        a[m][3] = pack<Element>(right[2], right[3]);
      }
#pragma unroll
      for (int pair = 0; pair < kDimTiles / 2; ++pair) {
        std::uint32_t b[4];
        load_matrices_transposed(b, Tile::column_block(key_lane, pair) + depth * 16 * Tile::kRowBytes);
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          multiply<Element>(sums[m][2 * pair], a[m], b[0], b[1]);
          multiply<Element>(sums[m][2 * pair + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  __device__ void run_dense() {
    const int last_row = min(first_row + Config::kRows, params.rows) - 1;
    const int tiles = (causal_limit(params.visibility, existing, last_row) + kTileKeys - 1) / kTileKeys;
    if (tiles > 0) load_tile(0, 0);
    commit_copies();
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = Config::kStages == 2 ? tile % 2 : 0;
      wait_copies<0>();
      __syncthreads();
      if (Config::kStages == 2 && tile + 1 < tiles) load_tile(tile + 1, stage ^ 1);
      commit_copies();
      run_tile(tile, stage);
      if (Config::kStages == 1) {
        __syncthreads();
        if (tile + 1 < tiles) load_tile(tile + 1, 0);
        commit_copies();
      }
    }
  }

  __device__ int next_planned() {
    constexpr std::uint32_t kBlockUnits = (1u << (Config::kRows / kUnitRows)) - 1;
    return planned.next(params.plan, recomputed(chunk),
                        kBlockUnits << (recomputed(first_row) % kChunkRows / kUnitRows));
  }

  // As in forward.cuh: indices three tiles ahead, facts two, words one.
  __device__ void run_planned() {
    planned.template start<Element, kRowBias>(params, chunk, batch, head, first_row);
    int tile = next_planned();
    int ahead = tile < 0 ? -1 : next_planned();
    int far_ahead = ahead < 0 ? -1 : next_planned();
    planned.request_index(params.plan, chunk, tile, 0);
    planned.request_index(params.plan, chunk, ahead, 1);
    commit_copies();
    wait_copies<0>();
    auto flight = planned.template request_facts<Element>(params, tile, 0, existing);
    commit_copies();
    wait_copies<0>();
    planned.make_facts(params.visibility, flight, tile, 0, existing, first_row);
    flight = planned.template request_facts<Element>(params, ahead, 1, existing);
    __syncthreads();
    planned.request_index(params.plan, chunk, far_ahead, 0);
    if (tile >= 0) load_tile(0, 0);
    commit_copies();
    for (int buffer = 0; tile >= 0; buffer ^= 1) {
      const int stage = Config::kStages == 2 ? buffer : 0;
      wait_copies<0>();
      planned.make_facts(params.visibility, flight, ahead, buffer ^ 1, existing, first_row);
      __syncthreads();
      if (Config::kStages == 2 && ahead >= 0) load_tile(buffer ^ 1, stage ^ 1);
      flight = planned.template request_facts<Element>(params, far_ahead, buffer, existing);
      const int next = far_ahead < 0 ? -1 : next_planned();
      planned.request_index(params.plan, recomputed(chunk), next, buffer ^ 1);
      commit_copies();
      run_tile(buffer, stage, is_full(tile));
      __syncthreads();
      if (Config::kStages == 1) {
        if (ahead >= 0) load_tile(buffer ^ 1, 0);
        commit_copies();
      }
      tile = ahead;
      ahead = far_ahead;
      far_ahead = next;
    }
  }

  __device__ void store() const {
    const std::uint32_t lane_bytes = 4 * (lane % 4);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i)
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
        const float* pair = &sums[i / 2][n][2 * (i % 2)];
        store_shared(queries.piece(row_of(i), n) + lane_bytes,
                     pack<Element>(pair[0] * params.scale, pair[1] * params.scale));
      }
    __syncwarp();  // a warp's queries, and now results, are its own
    auto* base = static_cast<std::uint16_t*>(params.dquery.data) + batch * params.dquery.batch_stride +
                 head * params.dquery.head_stride;
    for (int index = lane; index < Config::kWarpRows * Tile::kPieces; index += 32) {
      const int row = warp * Config::kWarpRows + index / Tile::kPieces, piece = index % Tile::kPieces;
      if (first_row + row >= params.rows) continue;
      std::uint32_t words[4];
      load_shared_16(words, queries.piece(row, piece));
      store_piece(base + (first_row + row) * params.dquery.token_stride, piece, words, params.head_dim, params.aligned);
    }
  }

  __device__ void run() {
    load_row_tiles();
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

// One block a tile of rows of a head; with a bias gradient that several heads or batch elements share, it takes them
// one after another, as it alone owns its rows of that gradient.
template <typename Element, int kHeadDim, bool kPlanned, bool kRowBias>
__global__ void __launch_bounds__(QueryBackwardConfig<kHeadDim, kPlanned>::kThreads,
                                  QueryBackwardConfig<kHeadDim, kPlanned>::kBlocksPerProcessor)
    query_backward_kernel(const __grid_constant__ BackwardParams params, int shared_batches, int shared_heads) {
  using Config = QueryBackwardConfig<kHeadDim, kPlanned>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const int row_tiles = (params.rows + Config::kRows - 1) / Config::kRows;
  const int row_tile = row_tiles - 1 - static_cast<int>(blockIdx.x % static_cast<unsigned>(row_tiles));
  const int owner = static_cast<int>(blockIdx.x / static_cast<unsigned>(row_tiles));
  const int head_owners = params.heads / shared_heads;
  for (int batch = owner / head_owners * shared_batches, batches = shared_batches; batches > 0; ++batch, --batches) {
    for (int head = owner % head_owners * shared_heads, heads = shared_heads; heads > 0; ++head, --heads) {
      QueryBackwardBlock<Element, kHeadDim, kPlanned, kRowBias>(params, batch, head, row_tile * Config::kRows, shared)
          .run();
      __syncthreads();
    }
  }
}

}  // namespace flash_dmattn::internal::cuda
