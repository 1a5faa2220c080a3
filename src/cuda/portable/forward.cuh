// The portable forward: flash attention with mma.sync over the tiles of keys that a block of rows sees.
//
// One block owns kRows query rows of one head. Keys and values come in tiles by cp.async: while scores are computed
// from a tile of keys its values arrive, and while the values are used the next keys arrive. Which tiles there are is
// arithmetic (causal rule and lengths only) or read from a plan, whose keys are gathered while they are copied.
#pragma once

#include "cuda/portable/forward_config.h"
#include "cuda/portable/hide.cuh"
#include "cuda/portable/tokens.cuh"
#include "cuda/portable/walk.cuh"
#include "cuda/ptx/block_product.cuh"

namespace flash_dmattn::internal::cuda {

template <typename Element, int kHeadDim, bool kPlanned, bool kRowBias>
struct ForwardBlock {
  using Config = ForwardConfig<kHeadDim, kPlanned, kRowBias>;
  static constexpr int kTileKeys = Config::kTileKeys;
  static constexpr int kMTiles = Config::kWarpRows / 16;
  static constexpr int kKeyTiles = kTileKeys / 8;  // columns of a score fragment
  static constexpr int kDimTiles = kHeadDim / 8;
  static constexpr int kThreadRows = 2 * kMTiles;  // rows of which a thread holds parts
  using Tile = SharedTile<kHeadDim>;
  using Tiles = PlannedTiles<kListTile, Config::kWords, Config::kWarps>;
  using Facts = typename Tiles::Facts;

  const ForwardParams& params;
  int batch, head, key_head, first_row, existing;
  int warp, lane;
  Tile queries, keys, values;
  Tiles& planned;  // only in a plan
  int chunk;
  float scores[kMTiles][kKeyTiles][4];
  float sums[kMTiles][kDimTiles][4];
  float row_max[kThreadRows], row_sum[kThreadRows];

  __device__ ForwardBlock(const ForwardParams& params, int batch, int head, int first_row, unsigned char* shared)
      : params(params),
        batch(batch),
        head(head),
        key_head(head / params.group),
        first_row(first_row),
        existing(key_count(params.visibility, batch)),
        warp(static_cast<int>(threadIdx.x) / 32),
        lane(static_cast<int>(threadIdx.x) % 32),
        queries{shared_address(shared)},
        keys{queries.address + static_cast<std::uint32_t>(Config::kQueryBytes)},
        values{keys.address + static_cast<std::uint32_t>(Config::kTileBytes)},
        planned(*reinterpret_cast<Tiles*>(shared + Config::kQueryBytes + 2 * Config::kTileBytes)) {
    static_assert(!kPlanned || sizeof(Tiles) == Config::kPlanBytes);
    chunk = kPlanned ? static_cast<int>(params.plan.first_chunk(batch, head)) + first_row / kChunkRows : 0;
    clear(sums);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) row_max[i] = -INFINITY, row_sum[i] = 0;
  }

  // The thread's row number i, within the block.
  __device__ int row_of(int i) const { return warp * Config::kWarpRows + (i / 2) * 16 + (i % 2) * 8 + lane / 4; }
  // The first of the thread's two columns of column tile n.
  __device__ int column_of(int n) const { return n * 8 + 2 * (lane % 4); }

  __device__ TokenRows rows_of(const TokenView& tokens, int token_head, int first) const {
    return {static_cast<const std::uint16_t*>(tokens.data) + recomputed(batch) * tokens.batch_stride +
                recomputed(token_head) * tokens.head_stride + first * tokens.token_stride,
            tokens.token_stride};
  }

  __device__ void load_queries() const {
    const Tile tiles[] = {queries};
    const TokenRows sources[] = {rows_of(params.query, head, first_row)};
    load_rows<Config::kRows, kHeadDim, Config::kThreads>(
        tiles, sources, [&](int row) { return first_row + row < params.rows ? row : -1; }, params.head_dim,
        params.aligned);
  }

  // `tokens` is key or value. In a plan, `tile` names the facts to go by, else the position of the tile.
  __device__ void load_tile(Tile target, const TokenView& tokens, int tile) const {
    const Tile tiles[] = {target};
    const TokenRows sources[] = {rows_of(tokens, key_head, kPlanned ? 0 : tile * kTileKeys)};
    load_rows<kTileKeys, kHeadDim, Config::kThreads>(
        tiles, sources,
        [&](int row) {
          if constexpr (kPlanned) return planned.facts[tile].key[row];
          return tile * kTileKeys + row < existing ? row : -1;
        },
        params.head_dim, params.aligned);
  }

  // scores = queries keys^T
  __device__ void multiply_keys() {
    clear(scores);
    multiply_blocks<Element, kHeadDim, Depth::kAlongRows, Depth::kAlongRows>(scores, queries, warp * Config::kWarpRows,
                                                                             keys, 0);
  }

  // sums += probabilities values
  __device__ void multiply_values() {
    const int any_lane = recomputed(lane);
    const std::uint32_t value_lane = values.lane_address(row_major_lane_row(any_lane), row_major_lane_half(any_lane));
    constexpr int kPairs = kDimTiles / 2, kDepths = kTileKeys / 16;
    const auto load = [&](std::uint32_t(&fragment)[4], int depth, int pair) {
      load_matrices_transposed(fragment, Tile::column_block(value_lane, pair) + depth * 16 * Tile::kRowBytes);
    };
    // One fragment ahead of the products.
    std::uint32_t b[2][4];
    load(b[0], 0, 0);
#pragma unroll
    for (int depth = 0; depth < kDepths; ++depth) {
      std::uint32_t a[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        const float(&left)[4] = scores[m][2 * depth];
        const float(&right)[4] = scores[m][2 * depth + 1];
        a[m][0] = pack<Element>(left[0], left[1]);
        a[m][1] = pack<Element>(left[2], left[3]);
        a[m][2] = pack<Element>(right[0], right[1]);
        a[m][3] = pack<Element>(right[2], right[3]);
      }
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int now = (depth * kPairs + pair) % 2;
        if (pair + 1 < kPairs) {
          load(b[now ^ 1], depth, pair + 1);
        } else if (depth + 1 < kDepths) {
          load(b[now ^ 1], depth + 1, 0);
        }
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          multiply<Element>(sums[m][2 * pair], a[m], b[now][0], b[now][1]);
          multiply<Element>(sums[m][2 * pair + 1], a[m], b[now][2], b[now][3]);
        }
      }
    }
  }

  // Softcap and bias. `position` is as in load_tile.
  __device__ void transform_scores(int position) {
    scale_products(params.score, scores);
    const BroadcastView& bias = params.bias;
    if (!kRowBias && !bias.defined()) return;
    const std::int64_t offset = bias.offset(recomputed(batch), recomputed(head));
    const auto key_of = [&](int n, int pair) {
      const int column = column_of(n) + pair;
      if constexpr (kPlanned) return planned.facts[position].key[column];
      const int key = position * kTileKeys + column;
      return key < existing ? key : -1;
    };
    if constexpr (kRowBias) {
      add_row_bias<Element>(bias, offset, params.rows, scores, [&](int i) { return first_row + row_of(i); }, key_of);
    } else {
      add_key_bias(scores, [&](int n) {
        if constexpr (kPlanned) return *reinterpret_cast<const float2*>(&planned.facts[position].bias[column_of(n)]);
        const auto read = [&](int key) {
          return key < 0 ? 0.0f : kLog2E * load_bias<Element>(bias, offset + key * bias.key_stride);
        };
        return make_float2(read(key_of(n, 0)), read(key_of(n, 1)));
      });
    }
  }

  // Hides what the causal rule and the length hide.
  __device__ void hide_tile(int tile) {
    hide_past_limits(
        scores,
        [&](int i) { return causal_limit(params.visibility, existing, first_row + row_of(i)) - tile * kTileKeys; },
        [&](int n) { return column_of(n); }, -INFINITY);
  }

  __device__ const std::uint32_t* warp_words(const Facts& tile) const {
    return tile.words[warp * Config::kWarpRows / kWordRows];
  }

  // Turns scores into probabilities relative to the new row maxima and rescales what was summed before.
  __device__ void softmax() {
    const float multiplier = params.score.multiplier;
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int m = i / 2, half = 2 * (i % 2);
      float highest = row_max[i];
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) highest = fmaxf(highest, fmaxf(scores[m][n][half], scores[m][n][half + 1]));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      // A row that has seen nothing yet: every probability must come out as 0, not as NaN.
      const float reference = highest == -INFINITY ? 0.0f : highest * multiplier;
      const float rescale = exp2_fast(row_max[i] * multiplier - reference);
      row_max[i] = highest;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          float& score = scores[m][n][half + pair];
          score = exp2_fast(fmaf(score, multiplier, -reference));
          sum += score;
        }
      row_sum[i] = row_sum[i] * rescale + sum;
      // Seldom: after the first tiles a maximum hardly moves.
      if (__any_sync(~0u, rescale != 1)) {
#pragma unroll
        for (int n = 0; n < kDimTiles; ++n) {
          sums[m][n][half] *= rescale;
          sums[m][n][half + 1] *= rescale;
        }
      }
    }
  }

  __device__ void store() {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      float sum = row_sum[i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const bool empty = row_max[i] == -INFINITY && sum == 0;
      const float inverse = empty ? 0.0f : 1.0f / sum;
      const int row = first_row + row_of(i);
      if (lane % 4 == 0 && row < params.rows) {
        params.lse[(static_cast<std::int64_t>(batch) * params.heads + head) * params.rows + row] =
            empty ? -INFINITY : kLn2 * (row_max[i] * params.score.multiplier + log2f(sum));
      }
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n) {
        const float* pair = &sums[i / 2][n][2 * (i % 2)];
        store_shared(queries.piece(row_of(i), n) + 4 * (lane % 4), pack<Element>(pair[0] * inverse, pair[1] * inverse));
      }
    }
    __syncwarp();  // the warp's queries, and now results, are its own
    auto* base =
        static_cast<std::uint16_t*>(params.out.data) + batch * params.out.batch_stride + head * params.out.head_stride;
    for (int index = lane; index < Config::kWarpRows * Tile::kPieces; index += 32) {
      const int row = warp * Config::kWarpRows + index / Tile::kPieces, piece = index % Tile::kPieces;
      if (first_row + row >= params.rows) continue;
      std::uint32_t words[4];
      load_shared_16(words, queries.piece(row, piece));
      store_piece(base + (first_row + row) * params.out.token_stride, piece, words, params.head_dim, params.aligned);
    }
  }

  __device__ void run_dense() {
    const int last_row = min(first_row + Config::kRows, params.rows) - 1;
    const int limit = causal_limit(params.visibility, existing, last_row);
    // Tiles from here on hold keys that some row must not see.
    const int first_limit = causal_limit(params.visibility, existing, first_row);
    load_queries();
    // From the last to the first, so that those with hidden keys come first.
    int tile = (limit + kTileKeys - 1) / kTileKeys - 1;
    if (tile >= 0) load_tile(keys, params.key, tile);
    commit_copies();
    for (; tile >= 0; --tile) {
      wait_copies<0>();
      __syncthreads();
      load_tile(values, params.value, tile);
      commit_copies();
      multiply_keys();
      if (params.score.transforms) transform_scores(tile);
      if ((tile + 1) * kTileKeys > first_limit) hide_tile(tile);
      wait_copies<0>();
      __syncthreads();
      if (tile > 0) load_tile(keys, params.key, tile - 1);
      commit_copies();
      softmax();
      multiply_values();
    }
    wait_copies<0>();
    store();
  }

  __device__ int next_planned() {
    constexpr std::uint32_t kBlockUnits = (1u << (Config::kRows / kUnitRows)) - 1;
    return planned.next(params.plan, recomputed(chunk),
                        kBlockUnits << (recomputed(first_row) % kChunkRows / kUnitRows));
  }
  __device__ typename Tiles::InFlight request_facts(int tile, int buffer) {
    return planned.template request_facts<Element>(params, tile, buffer, existing);
  }
  __device__ void make_facts(const typename Tiles::InFlight& flight, int tile, int buffer) {
    planned.make_facts(params.visibility, flight, tile, buffer, existing, first_row);
  }

  // Whether the warp's rows see any of the tile's keys, and whether they see all.
  __device__ void look_at_words(const Facts& facts, bool* any, bool* all) const {
    const std::uint32_t warp_rows = Config::kWarpRows == 32 ? ~0u : 0xffffu << (warp * 16 % kWordRows);
    std::uint32_t some = 0, every = ~0u;
#pragma unroll
    for (int key = lane; key < kTileKeys; key += 32) {
      some |= warp_words(facts)[key];
      every &= warp_words(facts)[key];
    }
    *any = __any_sync(~0u, (some & warp_rows) != 0);
    *all = __all_sync(~0u, (every & warp_rows) == warp_rows);
  }

  __device__ void run_planned() {
    planned.template start<Element, kRowBias>(params, chunk, batch, head, first_row);
    load_queries();
    // Tiles this far ahead of the one that is computed.
    int tile = next_planned();
    int ahead = tile < 0 ? -1 : next_planned();
    int far_ahead = ahead < 0 ? -1 : next_planned();
    planned.request_index(params.plan, chunk, tile, 0);
    planned.request_index(params.plan, chunk, ahead, 1);
    commit_copies();
    wait_copies<0>();
    typename Tiles::InFlight flight = request_facts(tile, 0);
    commit_copies();
    wait_copies<0>();
    make_facts(flight, tile, 0);
    flight = request_facts(ahead, 1);
    __syncthreads();
    planned.request_index(params.plan, chunk, far_ahead, 0);
    if (tile >= 0) load_tile(keys, params.key, 0);
    commit_copies();
    for (int buffer = 0; tile >= 0; buffer ^= 1) {
      const Facts& facts = planned.facts[buffer];
      wait_copies<0>();
      __syncthreads();
      load_tile(values, params.value, buffer);
      commit_copies();
      bool sees_any = true, sees_all = true;
      if (!is_full(tile)) look_at_words(facts, &sees_any, &sees_all);
      if (sees_any) {
        multiply_keys();
        if (params.score.transforms) transform_scores(buffer);
        if (!sees_all) {
          hide_by_words(
              scores, warp_words(facts), warp * Config::kWarpRows % kWordRows, [&](int n) { return column_of(n); },
              -INFINITY);
        }
      }
      make_facts(flight, ahead, buffer ^ 1);
      wait_copies<0>();
      __syncthreads();
      tile = ahead;
      ahead = far_ahead;
      if (tile >= 0) load_tile(keys, params.key, buffer ^ 1);
      flight = request_facts(ahead, buffer);
      far_ahead = ahead < 0 ? -1 : next_planned();
      planned.request_index(params.plan, recomputed(chunk), far_ahead, buffer ^ 1);
      commit_copies();
      if (sees_any) {
        softmax();
        multiply_values();
      }
    }
    wait_copies<0>();
    store();
  }
};

template <typename Element, int kHeadDim, bool kPlanned, bool kRowBias>
__global__ void __launch_bounds__(ForwardConfig<kHeadDim, kPlanned, kRowBias>::kThreads,
                                  ForwardConfig<kHeadDim, kPlanned, kRowBias>::kBlocksPerProcessor)
    forward_kernel(const __grid_constant__ ForwardParams params) {
  using Config = ForwardConfig<kHeadDim, kPlanned, kRowBias>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const int row_tiles = (params.rows + Config::kRows - 1) / Config::kRows;
  const int pair = static_cast<int>(blockIdx.x / static_cast<unsigned>(row_tiles));
  // Under the causal rule the last rows see the most: they start first.
  const int row_tile = row_tiles - 1 - static_cast<int>(blockIdx.x % static_cast<unsigned>(row_tiles));
  ForwardBlock<Element, kHeadDim, kPlanned, kRowBias> block(params, pair / params.heads, pair % params.heads,
                                                            row_tile * Config::kRows, shared);
  if constexpr (kPlanned) {
    block.run_planned();
  } else {
    block.run_dense();
  }
}

}  // namespace flash_dmattn::internal::cuda
