// Attention of a few query rows over many keys: bound by the reading of keys and values.
//
// All heads of a group and all query rows are the rows of one product, so that keys and values are read once. A block
// owns a part of the keys (a split). Its warps list the keys that some row sees together; then each gathers every
// fourth tile of these by cp.async, ahead of its use, and keeps sums of its own. The warps' sums are put together at
// the end, those of the splits by the blocks of a cluster or by a second kernel. Where rows have lists of keys, splits
// are striped over all keys, and what precedes the tiles is a kernel of its own (decode_lists_kernel).
#pragma once

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tokens.cuh"
#include "cuda/attention/warp_gemm.cuh"
#include "cuda/decode/combine.cuh"
#include "cuda/decode/config.h"
#include "cuda/decode/decode_block.cuh"
#include "cuda/decode/key_list.cuh"
#include "cuda/decode/key_union.cuh"
#include "cuda/decode/merge.cuh"
#include "cuda/launch_blocks.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/dynamic_shared.cuh"

namespace flash_dmattn::internal::cuda {

// kFewRows: the block has at most 8 rows, which are then columns of the tensor core's products, and keys their rows:
// S^T = K Q^T, O^T = V^T P^T. That takes half as many products and exponentials as 16 rows do. Fragments of scores and
// sums are kept as if they had been transposed back, so that row i of a thread means the same in both cases.
template <typename Element, int kHeadDim, bool kFewRows>
struct DecodeWarp {
  using Config = DecodeConfig<kHeadDim, kFewRows>;
  using Tile = SharedTile<kHeadDim>;
  static constexpr RowLanes kRowLanes = kFewRows ? RowLanes::kEveryFourth : RowLanes::kNeighbours;
  static constexpr int kTileKeys = Config::kTileKeys;
  static constexpr int kTileColumns = kFewRows ? 16 : 8;  // keys, or columns of values, of an element of a fragment
  static constexpr int kNTiles = kTileKeys / kTileColumns;
  static constexpr int kDimNTiles = kHeadDim / kTileColumns;
  static constexpr int kDepths = kHeadDim / 16;
  // A warp's 32 lanes divide the rows of a tile like this: a few neighbours (128 bytes at a time) take a row.
  static constexpr int kLanesPerRow = Tile::kPieces % 8 == 0 ? 8 : 4;
  static constexpr int kRowsAtOnce = 32 / kLanesPerRow;

  const DecodeParams& params;
  const DecodeBlock& block;
  int lane;
  const std::uint16_t *key_base, *value_base;  // where block.begin, from which distances of keys count, lies
  std::uint32_t tiles;                         // the warp's shared memory: those of keys, then of values
  Tile query_tile;
  std::uint32_t queries[kFewRows ? kDepths : 1][2];  // those of few rows, as an operand of products
  float scores[1][kNTiles][4];
  float accumulators[1][kDimNTiles][4];
  float row_max[2], row_sum[2];
  bool is_safe = false;  // whether a row of the warp has been huge
  float true_max[2];     // then

  __device__ DecodeWarp(const DecodeParams& params, const DecodeBlock& block, unsigned char* shared)
      : params(params), block(block), lane(static_cast<int>(threadIdx.x) % 32) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const auto base_of = [&](const TokenView& tokens) {
      return static_cast<const std::uint16_t*>(tokens.data) + block.batch * tokens.batch_stride +
             block.key_head * tokens.head_stride + block.begin * tokens.token_stride;
    };
    key_base = base_of(params.key);
    value_base = base_of(params.value);
    tiles = shared_address(shared) + static_cast<std::uint32_t>(warp * (Config::kTilesBytes / Config::kWarps));
    query_tile.address = shared_address(shared) + static_cast<std::uint32_t>(Config::kTilesBytes);
    clear(accumulators);
    row_max[0] = row_max[1] = -INFINITY;
    row_sum[0] = row_sum[1] = 0;
  }

  __device__ Tile key_tile(int stage) const { return {tiles + stage * static_cast<int>(Config::kTileBytes)}; }
  __device__ Tile value_tile(int stage) const { return key_tile(Config::kKeyStages + stage % Config::kValueStages); }
  // The row i (0 or 1) of the block of which the lane holds scores, and column `pair` (0 or 1) of its column tile n.
  __device__ int row_of(int i) const { return kFewRows ? 2 * (lane % 4) + i : lane / 4 + 8 * i; }
  __device__ bool is_first_of_row() const { return (kFewRows ? lane / 4 : lane % 4) == 0; }
  __device__ int column_of(int n, int pair) const {
    return kTileColumns * n + (kFewRows ? lane / 4 + 8 * pair : 2 * (lane % 4) + pair);
  }

  // All threads of the block together; the first group of copies.
  __device__ void load_queries() {
    for (int index = static_cast<int>(threadIdx.x); index < Config::kRows * Tile::kPieces; index += Config::kThreads) {
      const int m = index / Tile::kPieces, piece = index % Tile::kPieces;
      const bool exists = m < block.count;
      const auto* source =
          static_cast<const std::uint16_t*>(params.query.data) + block.batch * params.query.batch_stride;
      if (exists) source += block.row(m) * params.query.token_stride + block.head(m) * params.query.head_stride;
      if (params.aligned) {
        copy_async_16(query_tile.piece(m, piece), source + piece * 8, exists && piece * 8 < params.head_dim);
      } else {
        load_piece_by_element<kHeadDim>(query_tile.piece(m, piece), exists ? source : nullptr, piece, params.head_dim);
      }
    }
    commit_copies();
  }

  // Of few rows, once they are there.
  __device__ void read_queries() {
    if constexpr (kFewRows) {
#pragma unroll
      for (int depth = 0; depth < kDepths; depth += 2) {
        std::uint32_t both[4];
        load_matrices(both, query_tile.piece(lane % 8, 2 * depth + lane / 8));
        queries[depth][0] = both[0], queries[depth][1] = both[1];
        queries[depth + 1][0] = both[2], queries[depth + 1][1] = both[3];
      }
    }
  }

  // sum += a b, where the product's columns are the rows of `sum`
  __device__ static void multiply_columns(float (&sum)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                          std::uint32_t b1) {
    float product[4] = {sum[0], sum[2], sum[1], sum[3]};
    multiply<Element>(product, a, b0, b1);
    sum[0] = product[0], sum[2] = product[1], sum[1] = product[2], sum[3] = product[3];
  }

  __device__ void load_query_fragment(std::uint32_t (&fragment)[4], int depth) const {
    load_matrices(fragment, Tile::column_block(
                                query_tile.lane_address(row_major_lane_row(lane), row_major_lane_half(lane)), depth));
  }

  // Starts copying the rows of `tokens`, which begin at `base` and have `columns`, of a tile's keys, whose distances
  // the lanes have. Rows without a key (-1) become zeros.
  __device__ void load_tile(Tile target, const std::uint16_t* base, const TokenView& tokens, int columns,
                            std::int32_t distances) const {
    const auto own_lane = static_cast<unsigned>(recomputed(lane));  // no register to spare for addresses
    const int lane_row = own_lane / kLanesPerRow, lane_piece = own_lane % kLanesPerRow;
    if (!params.aligned) {
#pragma unroll 1
      for (int row = lane_row; row < kTileKeys; row += kRowsAtOnce) {
        const std::int32_t distance = __shfl_sync(~0u, distances, row);
        const std::uint16_t* source = distance >= 0 ? base + distance * tokens.token_stride : nullptr;
#pragma unroll 1
        for (int piece = lane_piece; piece < Tile::kPieces; piece += kLanesPerRow) {
          load_piece_by_element<kHeadDim>(target.piece(row, piece), source, piece, columns);
        }
      }
      return;
    }
    // A warp is short of instructions' time, not of memory's: so what the rows have in common is computed once. They
    // are swizzled alike if they are a multiple of 8 apart, as are pieces that are a multiple of kLanesPerRow apart.
    static_assert(8 % kRowsAtOnce == 0 && kLanesPerRow == Tile::kGroup);
    constexpr int kSwizzles = 8 / kRowsAtOnce;
    std::uint32_t targets[kSwizzles];
#pragma unroll
    for (int i = 0; i < kSwizzles; ++i) targets[i] = target.piece(lane_row + i * kRowsAtOnce, lane_piece);
    const std::uint16_t* lane_base = base + lane_piece * 8;
    const auto stride = static_cast<std::int32_t>(tokens.token_stride) * 2;  // those of aligned tokens fit
#pragma unroll
    for (int step = 0; step < kTileKeys / kRowsAtOnce; ++step) {
      const std::int32_t distance = __shfl_sync(~0u, distances, lane_row + step * kRowsAtOnce);
      const std::uint16_t* source = offset_pointer(lane_base, distance, stride);
      const std::uint32_t row_target = targets[step % kSwizzles] + step / kSwizzles * 8 * Tile::kRowBytes;
#pragma unroll
      for (int piece = 0; piece < Tile::kPieces; piece += kLanesPerRow) {
        copy_async_16(row_target + piece * 16, source + piece * 8, distance >= 0 && (piece + lane_piece) * 8 < columns);
      }
    }
  }

  // scores = queries keys^T
  __device__ void multiply_keys(Tile keys) {
    clear(scores);
    if constexpr (kFewRows) {
      const std::uint32_t key_lane = keys.lane_address(row_major_lane_row(lane), row_major_lane_half(lane));
#pragma unroll
      for (int depth = 0; depth < kDepths; ++depth)
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          std::uint32_t a[4];
          load_matrices(a, Tile::column_block(key_lane, depth) + n * 16 * Tile::kRowBytes);
          multiply_columns(scores[0][n], a, queries[depth][0], queries[depth][1]);
        }
    } else {
      const std::uint32_t key_lane = keys.lane_address(column_major_lane_row(lane), column_major_lane_half(lane));
#pragma unroll
      for (int depth = 0; depth < kDepths; ++depth) {
        std::uint32_t a[4];
        load_query_fragment(a, depth);
#pragma unroll
        for (int pair = 0; pair < kNTiles / 2; ++pair) {
          std::uint32_t b[4];
          load_matrices(b, Tile::column_block(key_lane, depth) + pair * 16 * Tile::kRowBytes);
          multiply<Element>(scores[0][2 * pair], a, b[0], b[1]);
          multiply<Element>(scores[0][2 * pair + 1], a, b[2], b[3]);
        }
      }
    }
  }

  // The biases of the lane's scores in a tile; columns without a key get the bias of block.begin.
  __device__ void load_biases(float (&biases)[kNTiles][4], std::int32_t distances) const {
    const BroadcastView& bias = params.bias;
    if (!bias.defined()) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int m = min(row_of(i), block.count - 1);
      const std::int64_t offset =
          bias.offset(block.batch, block.head(m)) + block.row(m) * bias.row_stride + block.begin * bias.key_stride;
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          const std::int32_t distance = max(__shfl_sync(~0u, distances, column_of(n, pair)), 0);
          biases[n][2 * i + pair] = load_bias<Element>(bias, offset + distance * bias.key_stride);
        }
    }
  }

  __device__ void make_scores(const float (&biases)[kNTiles][4]) {
    cap_products(params.score, scores);
    const float factor = params.score.outer_scale;
    if (!params.bias.defined()) return scale_by(factor, scores);
    // As scores.cuh has it.
    const bool rounds_twice = params.bias_by_row;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& score = scores[0][n][i];
        score =
            rounds_twice ? __fadd_rn(__fmul_rn(score, factor), biases[n][i]) : __fmaf_rn(score, factor, biases[n][i]);
      }
  }

  __device__ void hide_unseen(ListedKey keys) {
    if (__all_sync(~0u, lane >= kTileKeys || keys >> 16 == kAllRows)) return;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n)
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const std::uint32_t seen = __shfl_sync(~0u, keys, column_of(n, pair)) >> (16 + row_of(0));
        for_each_in_column(scores, n, pair, [&](int i, float& score) {
          if ((seen >> (row_of(i) - row_of(0)) & 1) == 0) score = -INFINITY;
        });
      }
  }

  __device__ void softmax() {
    const float multiplier = params.score.multiplier;
    float highest[2];
    bool huge = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      highest[i] = row_maximum<kRowLanes>(scores, i, row_max[i]);
      huge |= is_huge(reference_of(highest[i], multiplier));
    }
    if (is_safe || __any_sync(~0u, huge)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!is_safe) true_max[i] = row_max[i];
        shift_huge_row<kRowLanes>(params.score, i, true_max[i], scores, row_max, row_sum, accumulators);
        highest[i] = row_maximum<kRowLanes>(scores, i, row_max[i]);
      }
      is_safe = true;
    }
    update_softmax(multiplier, scores, row_max, row_sum, accumulators, [&](int i) { return highest[i]; });
  }

  // sums += probabilities values
  __device__ void add_values(Tile values) {
    if constexpr (kFewRows) {
      const std::uint32_t value_lane = values.lane_address(column_major_lane_row(lane), column_major_lane_half(lane));
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        const float(&keys)[4] = scores[0][n];
        const std::uint32_t b0 = transposed_matrix(pack<Element>(keys[0], keys[2])),
                            b1 = transposed_matrix(pack<Element>(keys[1], keys[3]));
#pragma unroll
        for (int m = 0; m < kDimNTiles; ++m) {
          std::uint32_t a[4];
          load_matrices_transposed(a, Tile::column_block(value_lane, m) + n * 16 * Tile::kRowBytes);
          multiply_columns(accumulators[0][m], a, b0, b1);
        }
      }
    } else {
      gemm_from_registers<Element>(accumulators, scores, values, 0);
    }
  }

  // Keys of a tile are asked for two steps before it, its values as many as there are places for. Every step commits
  // one group of copies of each, empty or not, which says how many younger ones there are when one is waited for.
  template <typename List>
  __device__ void run(List& list) {
    constexpr bool kTwoOfValues = Config::kValueStages == 2;
    const auto load_keys = [&](int stage, ListedKey keys) {
      const bool any = __shfl_sync(~0u, keys, 0) != 0;
      if (any) load_tile(key_tile(stage), key_base, params.key, params.head_dim, list.distance_of(keys));
      commit_copies();
    };
    const auto load_values = [&](int stage, ListedKey keys) {
      const bool any = __shfl_sync(~0u, keys, 0) != 0;
      if (any) load_tile(value_tile(stage), value_base, params.value, params.value_dim, list.distance_of(keys));
      commit_copies();
    };
    ListedKey now = list.next_tile();
    load_keys(0, now);
    load_values(0, now);
    ListedKey next = list.next_tile();
    load_keys(1, next);
    if (kTwoOfValues) load_values(1, next);
    wait_copies<kTwoOfValues ? 4 : 3>();
    __syncthreads();  // the queries are there; all warps have asked for two tiles (KeyList)
    read_queries();
    float biases[kNTiles][4];
    if (__shfl_sync(~0u, now, 0) != 0) load_biases(biases, list.distance_of(now));
#pragma unroll 1
    for (int stage = 0; __shfl_sync(~0u, now, 0) != 0; stage ^= 1) {
      const ListedKey ahead = list.next_tile();
      wait_copies<kTwoOfValues ? 3 : 2>();
      __syncwarp();
      multiply_keys(key_tile(stage));
      if (params.score.transforms) {
        make_scores(biases);
        load_biases(biases, list.distance_of(next));
      }
      hide_unseen(now);
      __syncwarp();
      if (kTwoOfValues) load_keys(stage, ahead);
      softmax();
      wait_copies<kTwoOfValues ? 3 : 1>();
      __syncwarp();
      add_values(value_tile(stage));
      __syncwarp();
      load_values(stage, kTwoOfValues ? ahead : next);
      if (!kTwoOfValues) load_keys(stage, ahead);
      now = next;
      next = ahead;
    }
    wait_copies<0>();
  }
};

template <typename Element, int kHeadDim, bool kFewRows>
__global__ void __launch_bounds__(DecodeConfig<kHeadDim, kFewRows>::kThreads,
                                  DecodeConfig<kHeadDim, kFewRows>::kBlocksPerProcessor)
    decode_kernel(const __grid_constant__ DecodeParams params) {
  using Config = DecodeConfig<kHeadDim, kFewRows>;
  using List = KeyList<Config>;
  auto* shared = dynamic_shared<unsigned char>();
  __shared__ DecodeBlock block;
  __shared__ typename List::State state;
  describe_block(params, false, block);
  auto* lists = reinterpret_cast<ListedKey*>(shared + Config::kTilesBytes + Config::kQueryBytes);
  // Made first, since it starts to read the mask.
  typename List::MaskBytes first_bytes;
  List list(params, block, state, lists, first_bytes);
  DecodeWarp<Element, kHeadDim, kFewRows> own(params, block, shared);
  own.load_queries();
  list.start(first_bytes);
  own.run(list);
  merge_warps<Element>(own, shared, reinterpret_cast<float2*>(lists));
}

// The same for rows with lists of keys. What finds the keys has the tiles' memory meanwhile.
template <typename Element, int kHeadDim, bool kFewRows>
__global__ void __launch_bounds__(DecodeConfig<kHeadDim, kFewRows>::kThreads,
                                  DecodeConfig<kHeadDim, kFewRows>::kBlocksPerProcessor)
    decode_lists_kernel(const __grid_constant__ DecodeParams params) {
  using Config = DecodeConfig<kHeadDim, kFewRows>;
  using Union = KeyUnion<Config>;
  auto* shared = dynamic_shared<unsigned char>();
  __shared__ DecodeBlock block;
  __shared__ typename Union::State state;
  describe_block(params, true, block);
  auto* lists = reinterpret_cast<ListedKey*>(shared + Config::kTilesBytes + Config::kQueryBytes);
  Union keys(params, block, state, shared, lists);
  DecodeWarp<Element, kHeadDim, kFewRows> own(params, block, shared);
  // While the first entries are on their way.
  const auto load_queries = [&] { own.load_queries(); };
  while (keys.find_next(load_queries)) {
    typename Union::List list = keys.found();
    own.run(list);
  }
  wait_copies<0>();  // of queries, if no key was found
  merge_warps<Element>(own, shared, reinterpret_cast<float2*>(lists));
}

template <typename Element, int kHeadDim, bool kFewRows>
cudaError_t launch_splits(const DecodeParams& params, cudaStream_t stream) {
  using Config = DecodeConfig<kHeadDim, kFewRows>;
  const std::int64_t blocks = std::int64_t{params.batch} * params.key_heads * params.row_tiles * params.splits;
  auto* kernel = params.indices.defined() ? decode_lists_kernel<Element, kHeadDim, kFewRows>
                                          : decode_kernel<Element, kHeadDim, kFewRows>;
  const int cluster_blocks = params.is_cluster ? params.splits : 1;
  return launch_blocks(kernel, {blocks, Config::kThreads, Config::kSharedBytes, params.begins_early, cluster_blocks},
                       stream, params);
}

template <typename Element, int kHeadDim>
cudaError_t launch_decode_kernels(const DecodeParams& params, cudaStream_t stream) {
  const bool few_rows = has_few_decode_rows(params.rows, params.group);
  const cudaError_t error = few_rows ? launch_splits<Element, kHeadDim, true>(params, stream)
                                     : launch_splits<Element, kHeadDim, false>(params, stream);
  const std::int64_t results = std::int64_t{params.batch} * params.heads * params.rows;
  if (error != cudaSuccess || params.splits == 1 || params.is_cluster) return error;
  return launch_blocks(combine_kernel<Element, kHeadDim>, {results, 32 * kCombineWarps, 0, few_rows}, stream, params);
}

}  // namespace flash_dmattn::internal::cuda
