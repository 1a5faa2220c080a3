// Attention of a few query rows over many keys: bound by the reading of keys and values.
//
// All heads of a group and all query rows are the rows of one product, so that keys and values are read once. A block
// owns a part of the keys (a split) and each of its warps a share of that: it lists the keys that some row sees,
// gathers them by cp.async into tiles of its own, two ahead, and keeps sums of its own. The warps' sums are put
// together at the end, those of the splits by a second kernel. Where rows have lists of keys, splits are striped over
// all keys, and what precedes the tiles is a kernel of its own (decode_lists_kernel).
#pragma once

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/scores.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/attention/tokens.cuh"
#include "cuda/attention/warp_gemm.cuh"
#include "cuda/decode/combine.cuh"
#include "cuda/decode/config.h"
#include "cuda/decode/key_list.cuh"
#include "cuda/decode/key_union.cuh"
#include "cuda/launch_blocks.cuh"
#include "cuda/plan/entry_offset.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/dynamic_shared.cuh"

namespace flash_dmattn::internal::cuda {

template <typename Element, int kHeadDim>
struct DecodeWarp {
  using Config = DecodeConfig<kHeadDim>;
  using Tile = SharedTile<kHeadDim>;
  static constexpr int kTileKeys = Config::kTileKeys;
  static constexpr int kNTiles = kTileKeys / 8;  // columns of a score fragment
  static constexpr int kDimNTiles = kHeadDim / 8;
  static constexpr int kDepths = kHeadDim / 16;
  // A warp's 32 lanes divide the rows of a tile like this: a few neighbours (128 bytes at a time) take a row.
  static constexpr int kLanesPerRow = Tile::kPieces % 8 == 0 ? 8 : 4;
  static constexpr int kRowsAtOnce = 32 / kLanesPerRow;

  const DecodeParams& params;
  const DecodeBlock& block;
  int lane;
  const std::uint16_t *key_base, *value_base;  // where block.begin, from which distances of keys count, lies
  std::uint32_t tiles;                         // the warp's shared memory: keys, values, keys, values
  Tile query_tile;
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

  __device__ Tile key_tile(int stage) const { return {tiles + stage * 2 * static_cast<int>(Config::kTileBytes)}; }
  __device__ Tile value_tile(int stage) const {
    return {tiles + (stage * 2 + 1) * static_cast<int>(Config::kTileBytes)};
  }
  // The row i (0 or 1) of the block of which the lane holds scores, and the first of its two columns of column tile n.
  __device__ int row_of(int i) const { return lane / 4 + 8 * i; }
  __device__ int column_of(int n) const { return n * 8 + 2 * (lane % 4); }

  // All threads of the block together; the first group of copies.
  __device__ void load_queries() {
    for (int index = static_cast<int>(threadIdx.x); index < kDecodeRows * Tile::kPieces; index += Config::kThreads) {
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
          const std::int32_t distance = max(__shfl_sync(~0u, distances, column_of(n) + pair), 0);
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
        const std::uint32_t seen = __shfl_sync(~0u, keys, column_of(n) + pair) >> (16 + lane / 4);
        for_each_in_column(scores, n, pair, [&](int i, float& score) {
          if ((seen >> (8 * i) & 1) == 0) score = -INFINITY;
        });
      }
  }

  __device__ void softmax() {
    const float multiplier = params.score.multiplier;
    float highest[2];
    bool huge = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      highest[i] = row_maximum(scores, i, row_max[i]);
      huge |= is_huge(reference_of(highest[i], multiplier));
    }
    if (is_safe || __any_sync(~0u, huge)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!is_safe) true_max[i] = row_max[i];
        shift_huge_row(params.score, i, true_max[i], scores, row_max, row_sum, accumulators);
        highest[i] = row_maximum(scores, i, row_max[i]);
      }
      is_safe = true;
    }
    update_softmax(multiplier, scores, row_max, row_sum, accumulators, [&](int i) { return highest[i]; });
  }

  // Every step commits one group of copies of keys and one of values, empty or not: at most three younger ones are
  // under way when a group is waited for.
  template <typename List>
  __device__ void run(List& list) {
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
    load_values(1, next);
    wait_copies<4>();
    __syncthreads();  // the queries are there
    float biases[kNTiles][4];
    if (__shfl_sync(~0u, now, 0) != 0) load_biases(biases, list.distance_of(now));
#pragma unroll 1
    for (int stage = 0; __shfl_sync(~0u, now, 0) != 0; stage ^= 1) {
      const ListedKey ahead = list.next_tile();
      wait_copies<3>();
      __syncwarp();
      multiply_keys(key_tile(stage));
      if (params.score.transforms) {
        make_scores(biases);
        load_biases(biases, list.distance_of(next));
      }
      hide_unseen(now);
      __syncwarp();
      load_keys(stage, ahead);
      softmax();
      wait_copies<3>();
      __syncwarp();
      gemm_from_registers<Element>(accumulators, scores, value_tile(stage), 0);
      __syncwarp();
      load_values(stage, ahead);
      now = next;
      next = ahead;
    }
    wait_copies<0>();
  }
};

// Adds up what the block's warps have and leaves it for the combine kernel, or stores the result if there is one split.
template <typename Element, int kHeadDim>
__device__ inline void merge_warps(DecodeWarp<Element, kHeadDim>& own, unsigned char* shared, float2* facts) {
  using Config = DecodeConfig<kHeadDim>;
  const DecodeParams& params = own.params;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  float highest[2], factor[2];
  __syncthreads();  // lists and tiles are free now
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum = own.row_sum[i];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    highest[i] = own.is_safe ? own.true_max[i] : own.row_max[i];
    factor[i] = unrounded(params.score, highest[i]);
    if (own.lane % 4 == 0) facts[warp * kDecodeRows + own.row_of(i)] = make_float2(highest[i], sum * factor[i]);
  }
  __syncthreads();
  float* all_sums = reinterpret_cast<float*>(shared);
  const auto total_highest = [&](int m) {
    float total = -INFINITY;
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) total = fmaxf(total, facts[w * kDecodeRows + m].x);
    return total;
  };
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float weight = factor[i] * weight_of(params.score, highest[i], total_highest(own.row_of(i)));
    float* row_sums = all_sums + (warp * kDecodeRows + own.row_of(i)) * Config::kSumsPitch;
    if (own.row_of(i) >= own.block.count) continue;  // nobody asks for it
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      const float* pair = &own.accumulators[0][n][2 * i];
      *reinterpret_cast<float2*>(row_sums + own.column_of(n)) = make_float2(pair[0] * weight, pair[1] * weight);
    }
  }
  float2* totals = facts + Config::kWarps * kDecodeRows;
  float* inverses = reinterpret_cast<float*>(totals + kDecodeRows);
  if (thread < kDecodeRows) {
    float2 total = make_float2(total_highest(thread), 0);
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) {
      const float2 part = facts[w * kDecodeRows + thread];
      total.y += part.y * weight_of(params.score, part.x, total.x);
    }
    totals[thread] = total;
    // Rows past the block's last have no head.
    if (thread < own.block.count) inverses[thread] = inverse_sum<Element>(params, own.block.head(thread), total);
  }
  __syncthreads();
  for (int index = thread; index < own.block.count * kHeadDim; index += Config::kThreads) {
    const int m = index / kHeadDim, column = index % kHeadDim;
    const int row = own.block.row(m), head = own.block.head(m);
    float sum = 0;
#pragma unroll
    for (int w = 0; w < Config::kWarps; ++w) sum += all_sums[(w * kDecodeRows + m) * Config::kSumsPitch + column];
    const std::int64_t result = (static_cast<std::int64_t>(own.block.batch) * params.heads + head) * params.rows + row;
    if (params.splits == 1) {
      store_result<Element>(params, own.block.batch, head, row, column, sum * inverses[m]);
      if (column == 0) store_row_facts(params, result, totals[m].x, totals[m].y);
    } else {
      params.partial_sums[(result * params.splits + own.block.split) * kHeadDim + column] = sum;
      if (column == 0) params.partial_facts[result * params.splits + own.block.split] = totals[m];
    }
  }
}

// By all threads; leaves a barrier behind. `has_lists`: the split's keys lie anywhere.
__device__ inline void describe_block(const DecodeParams& params, bool has_lists, DecodeBlock& block) {
  unsigned index = blockIdx.x;
  const auto take = [&](std::int32_t count) {
    const auto coordinate = static_cast<std::int32_t>(index % static_cast<unsigned>(count));
    index /= static_cast<unsigned>(count);
    return coordinate;
  };
  // Blocks that run at the same time read the same part of all heads, which lie side by side.
  const std::int32_t first = take(params.row_tiles) * kDecodeRows;
  const std::int32_t key_head = take(params.key_heads), split = take(params.splits);
  const auto batch = static_cast<std::int32_t>(index);
  if (const int m = static_cast<int>(threadIdx.x); m < kDecodeRows) {
    const unsigned pair = static_cast<unsigned>(first + m), group = static_cast<unsigned>(params.group);
    const auto row = static_cast<std::int32_t>(pair / group);
    block.rows[m] = row;
    block.heads[m] = key_head * params.group + static_cast<std::int32_t>(pair) - row * params.group;
  }
  if (threadIdx.x == 0) {
    block.batch = batch, block.key_head = key_head, block.split = split, block.first = first;
    block.count = min(params.rows * params.group - first, kDecodeRows);
    block.existing = key_count(params.visibility, batch);
    // Equal shares of the keys that exist.
    const int share = has_lists ? block.existing : decode_split_keys(block.existing, params.splits);
    const std::int64_t begin = has_lists ? 0 : std::int64_t{share} * split;
    block.begin = static_cast<std::int32_t>(min(begin, std::int64_t{block.existing}));
    block.end = block.begin + min(share, block.existing - block.begin);
    block.mask = nullptr;
    if (params.mask.defined()) {
      block.mask =
          static_cast<const std::uint8_t*>(params.mask.data) + entry_offset(params.mask, batch, block.heads[0]);
    }
  }
  __syncthreads();
}

template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(DecodeConfig<kHeadDim>::kThreads, DecodeConfig<kHeadDim>::kBlocksPerProcessor)
    decode_kernel(const __grid_constant__ DecodeParams params) {
  using Config = DecodeConfig<kHeadDim>;
  using List = KeyList<Config::kTileKeys, Config::kWarps>;
  auto* shared = dynamic_shared<unsigned char>();
  __shared__ DecodeBlock block;
  describe_block(params, false, block);
  auto* lists = reinterpret_cast<ListedKey*>(shared + Config::kTilesBytes + Config::kQueryBytes);
  // Made first, since it starts to read the mask.
  typename List::MaskBytes first_bytes;
  List list(params, block, lists + threadIdx.x / 32 * Config::kListKeys, first_bytes);
  DecodeWarp<Element, kHeadDim> own(params, block, shared);
  own.load_queries();
  list.start(first_bytes);
  own.run(list);
  merge_warps(own, shared, reinterpret_cast<float2*>(lists));
}

// The same for rows with lists of keys. What finds the keys has the tiles' memory meanwhile.
template <typename Element, int kHeadDim>
__global__ void __launch_bounds__(DecodeConfig<kHeadDim>::kThreads, DecodeConfig<kHeadDim>::kBlocksPerProcessor)
    decode_lists_kernel(const __grid_constant__ DecodeParams params) {
  using Config = DecodeConfig<kHeadDim>;
  using Union = KeyUnion<kHeadDim>;
  auto* shared = dynamic_shared<unsigned char>();
  __shared__ DecodeBlock block;
  __shared__ typename Union::State state;
  describe_block(params, true, block);
  auto* lists = reinterpret_cast<ListedKey*>(shared + Config::kTilesBytes + Config::kQueryBytes);
  Union keys(params, block, state, shared, lists);
  DecodeWarp<Element, kHeadDim> own(params, block, shared);
  // While the first entries are on their way.
  const auto load_queries = [&] { own.load_queries(); };
  while (keys.find_next(load_queries)) {
    typename Union::List list = keys.list_of_warp();
    own.run(list);
  }
  wait_copies<0>();  // of queries, if no key was found
  merge_warps(own, shared, reinterpret_cast<float2*>(lists));
}

template <typename Element, int kHeadDim>
cudaError_t launch_decode_kernels(const DecodeParams& params, cudaStream_t stream) {
  using Config = DecodeConfig<kHeadDim>;
  const std::int64_t blocks = std::int64_t{params.batch} * params.key_heads * params.row_tiles * params.splits;
  const std::int64_t results = std::int64_t{params.batch} * params.heads * params.rows;
  auto* kernel = params.indices.defined() ? decode_lists_kernel<Element, kHeadDim> : decode_kernel<Element, kHeadDim>;
  const cudaError_t error = launch_blocks(kernel, {blocks, Config::kThreads, Config::kSharedBytes}, stream, params);
  if (error != cudaSuccess || params.splits == 1) return error;
  return launch_blocks(combine_kernel<Element, kHeadDim>, {results, 32 * kCombineWarps}, stream, params);
}

}  // namespace flash_dmattn::internal::cuda
