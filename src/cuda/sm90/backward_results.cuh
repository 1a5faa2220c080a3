// Where gradients of the sm90 backward go: those of queries step by step, those of keys, values and a bias by works.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/key_block.cuh"
#include "cuda/attention/key_results.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/tokens.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/flags.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/staged_rows.cuh"
#include "cuda/sm90/step_facts.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

// Of the consumer with these steps (BackwardSteps).
template <typename Block, typename Steps>
struct BackwardResults {
  using Config = typename Block::Config;
  using Element = typename Block::Element;
  using Facts = typename Block::Facts;
  static constexpr int kHeadDim = Steps::kHeadDim, kTileRows = Steps::kTileRows;
  static constexpr int kKeyNTiles = Steps::kKeyNTiles, kQueryNTiles = Steps::kQueryNTiles;
  static constexpr std::uint32_t kKeyPanel = Steps::kKeyPanel;

  Steps& steps;

  // Adds part `part` of a step's query gradients in the order of the registers, so that neighbouring threads add to
  // neighbouring addresses (query_gradients.cu reads them). L2 is to keep the sums, to which other tiles of keys add.
  __device__ void add_query_gradients(const float (&dqueries)[kQueryNTiles][4], int part, int tile) const {
    add_query_gradients(dqueries, part, query_sums(part, tile));
  }
  // The thread's first sums.
  __device__ float* query_sums(int part, int tile) const {
    return steps.block.params.dquery_sums + static_cast<std::int64_t>(tile) * (kTileRows * kHeadDim) +
           (part * kQueryNTiles * kWarpGroup + steps.thread() % kWarpGroup) * 4;
  }
  template <int kNTiles>
  __device__ void add_query_gradients(const float (&dqueries)[kNTiles][4], int part, float* target) const {
    if (steps.block.params.dquery_sums == nullptr) return;
    const int first_n = part * kQueryNTiles;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      if (kHeadDim % 64 != 0 && first_n + n >= kKeyNTiles) break;
      const float(&four)[4] = dqueries[n];
      add_to_global(target + n * kWarpGroup * 4, four[0], four[1], four[2], four[3], L2Policy::kKept);
    }
  }

  // Those of the step with that number, whose rows no other step meets: dquery itself.
  __device__ void store_query_gradients(const float (&dqueries)[kQueryNTiles][4], int part, std::uint32_t step) const {
    const StepRows& rows = steps.block.shared.rows_met_once[step];
    const int first_n = Config::kSplitsRows ? 0 : part * kQueryNTiles;
    const float scale = steps.rare_params().score.scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kQueryNTiles; n += 4) {
        if (kHeadDim % 64 != 0 && first_n + n >= kKeyNTiles) break;
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float* pair = &dqueries[n + i][2 * half];
          words[i] = pack<Element>(pair[0] * scale, pair[1] * scale);
        }
        transpose_quad(words);
        const int row = (Config::kSplitsRows ? part * 64 : 0) + steps.warp() * 16 + steps.lane() / 4 + 8 * half;
        if (row < rows.count) {
          store_piece(rows.first + row * steps.rare_params().dquery.token_stride, first_n + n + steps.lane() % 4, words,
                      steps.rare_params().head_dim);
        }
      }
    }
  }

  // In a deterministic backward of a plan works of other entries have some of the same keys: each warp adds to sums
  // when all warps of all works of entries before have. It waits until `done`, where all count, says so; if it is null,
  // there are no turns.
  __device__ void await_earlier(const std::int32_t* done, int earlier_warps) const {
    if (done != nullptr && steps.lane() == 0) {
      while (load_acquiring(done) < earlier_warps) continue;
    }
    __syncwarp();
  }
  __device__ void count_done(std::int32_t* done) const {
    __syncwarp();
    if (done != nullptr && steps.lane() == 0) add_releasing(done, 1);
  }
  // Of sums of keys and values; of those of a head's bias.
  __device__ std::int32_t* keys_done() const {
    const BackwardParams& params = steps.rare_params();
    if (!Block::kPlanned || params.turns.keys == nullptr) return nullptr;
    return params.turns.keys + steps.work().block.batch * params.key_heads + steps.work().block.key_head;
  }
  __device__ std::int32_t* bias_done(int head) const {
    const BackwardParams& params = steps.rare_params();
    if (!Block::kPlanned || params.turns.bias == nullptr) return nullptr;
    return params.turns.bias + steps.work().block.batch * params.heads + head;
  }
  __device__ void await_turn_of_keys() const {
    await_earlier(keys_done(), steps.work().earlier_of_key_head * (4 * Config::kConsumers));
  }
  __device__ void pass_turn_of_keys() const { count_done(keys_done()); }
  __device__ void await_turn_of_bias(int head) const {
    await_earlier(bias_done(head),
                  steps.work().earlier_of_share * (Config::kSplitsGradients ? 4 : 4 * Config::kConsumers));
  }
  // A work without steps adds nothing, but those after it count it.
  __device__ void pass_turns_of_bias() const {
    const KeyBlock& keys = steps.work().block;
    if (!steps.has(Facts::kSumsKeyBias) || bias_done(0) == nullptr) return;
    for (int head = keys.first_head; head < keys.end_head; ++head) {
      await_turn_of_bias(head);
      count_done(bias_done(head));
    }
  }

  // Adds what steps of `head`, or of several heads with the same bias, have left in registers to global memory.
  __device__ void flush_key_bias_gradients(int head) {
    await_turn_of_bias(head);
    add_key_bias_gradients_of(head);
    count_done(bias_done(head));
  }
  __device__ void add_key_bias_gradients_of(int head) {
    const BackwardParams& params = steps.rare_params();
    const KeyBlock& keys = steps.work().block;
    float* sums = params.dbias_sums + keys.color * params.bias_color_stride + params.dbias.offset(keys.batch, head);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = steps.key_bias_gradient[i];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      steps.key_bias_gradient[i] = 0;
      const std::int32_t key = steps.work().key[steps.key_column() + 8 * i];
      if (steps.lane() % 4 == 0 && key >= 0) atomicAdd(sums + key * params.dbias.key_stride, sum);
    }
  }

  // Where other blocks have some of the block's gradients, each is added to `sums`, which have as many columns, else it
  // is stored.
  __device__ bool stores() const { return steps.work().block.stores; }
  template <int kNTiles>
  __device__ void add_up(const float (&gradient)[1][kNTiles][4], float* sums, float factor) const {
    const KeyBlock& keys = steps.work().block;
    add_to_sums<8 * kNTiles>(gradient, steps.block.params, keys, steps.work().key, steps.warp_key(), 0,
                             sums + keys.color * steps.block.params.key_color_stride * (8 * kNTiles), factor);
  }

  // ---- A tile whose steps are divided among several works, its segments. Each adds its gradients to sums, which lie
  // in the order of the registers; whichever comes last takes the sums, and stores them as its own.

  __device__ bool is_segment() const { return !Block::kPlanned && steps.work().block.cut >= 0; }
  // The thread's first sums of gradient `which` of two.
  __device__ float* segment_sums(int which) const {
    const std::int64_t tile = std::int64_t{steps.work().block.cut} * 2 + which;
    const std::int64_t key = tile * Block::kWorkKeys + Block::rank() * Config::kTileKeys + steps.warp_key();
    return steps.rare_params().tile_order.sums + key * kHeadDim + steps.lane() * 4;
  }
  template <int kNTiles>
  __device__ void add_segment(const float (&gradient)[1][kNTiles][4], int which) const {
    float* sums = segment_sums(which);
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      const float(&four)[4] = gradient[0][n];
      add_to_global(sums + n * 128, four[0], four[1], four[2], four[3]);
    }
  }
  template <int kNTiles>
  __device__ void take_segments(float (&gradient)[1][kNTiles][4], int which) const {
    const auto* sums = reinterpret_cast<const float4*>(segment_sums(which));
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      const float4 four = __ldcg(sums + n * 32);
      gradient[0][n][0] = four.x, gradient[0][n][1] = four.y, gradient[0][n][2] = four.z, gradient[0][n][3] = four.w;
    }
  }
  // Of the warp, once it has added: whether those of all other segments have.
  __device__ bool is_last_segment() const {
    const KeyTileOrder& order = steps.rare_params().tile_order;
    std::int32_t before = 0;
    __syncwarp();
    if (steps.lane() == 0) {
      before = add_releasing_and_acquiring(
          order.added + steps.work().block.cut * kMostTileWarps + 4 * (2 * Block::rank() + steps.group) + steps.warp(),
          1);
    }
    before = __shfl_sync(~0u, before, 0);
    __syncwarp();
    return before == order.segments - 1;
  }

  // Gradient `which` of two, to a tensor of keys, by the copy engine, from places of gradients of scores: that of the
  // step to come, and the next one. Nobody reads the former any more; nor the latter, as the other consumer has had its
  // turn, which ended with the products in it. (Head dim 64 needs a place for each gradient, and has two in the
  // former.) Until they are read, nothing may be written there: wait_until_read.
  template <int kNTiles>
  __device__ void store_boxes(const float (&gradient)[1][kNTiles][4], int which, const CUtensorMap& map,
                              float factor) const {
    const KeyBlock& keys = steps.work().block;
    const float factors[2] = {factor, factor};
#pragma unroll
    for (int panel = 0; panel < kNTiles / 8; ++panel) {
      const std::uint32_t own = steps.score_place(steps.number());
      const std::uint32_t place = Config::kKeyPanels == 1
                                      ? steps.score_gradients_at(own) + which * kKeyPanel
                                      : steps.score_gradients_at((own + panel) % Config::kScoreStages);
      const std::uint32_t staged = place + steps.warp_key() * 128;
      static_assert(Config::kKeyPanels == 2 || Config::kTileRows == 128);
      if (steps.lane() == 0 && Config::kKeyPanels == 2) wait_boxes_read<1>();
      __syncwarp();
      stage_columns<Element, 8>(staged, static_cast<unsigned>(steps.lane()), gradient, 8 * panel, factors);
      fence_async_proxy();
      __syncwarp();
      if (steps.lane() == 0) {
        store_box(map, panel * 64, keys.tile * Config::kTileKeys + steps.warp_key(), keys.key_head, keys.batch, staged);
        commit_boxes();
      }
    }
  }
  // Until what the warp has stored is read. By all its lanes.
  __device__ void wait_until_read() const {
    if constexpr (!Config::kStoresBoxes && !Config::kRowBiased) return;
    if (steps.lane() == 0) wait_boxes_read<0>();
    __syncwarp();
  }

  // `columns`: of the target.
  template <int kNTiles>
  __device__ void store(const float (&gradient)[1][kNTiles][4], const TokenView& target, int columns,
                        float factor) const {
    const BackwardParams& params = steps.block.params;
    const KeyBlock& keys = steps.work().block;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = Block::first_position(keys) + steps.key_column() + 8 * i;
      auto* row = static_cast<std::uint16_t*>(target.data) + keys.batch * target.batch_stride +
                  keys.key_head * target.head_stride + key * target.token_stride;
#pragma unroll
      for (int first = 0; first < kNTiles; first += 4) {
        std::uint32_t words[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float* pair = pair_at(gradient, i, first + n);
          words[n] = pack<Element>(pair[0] * factor, pair[1] * factor);
        }
        transpose_quad(words);
        if (key < params.keys) store_piece(row, first + steps.lane() % 4, words, columns);
      }
    }
  }

  // Of the steps that are added up in key_bias_gradient.
  __device__ int& head() const { return steps.block.shared.heads[4 * steps.group + steps.warp()]; }

  __device__ void start_sums_of_head() {
    const BroadcastView& dbias = steps.rare_params().dbias;
    const int batch = steps.work().block.batch, next = steps.facts().head;
    if (steps.has(Facts::kSumsKeyBias) && dbias.offset(batch, head()) != dbias.offset(batch, next)) {
      flush_key_bias_gradients(head());
    }
    __syncwarp();
    if (steps.lane() == 0) head() = next;
  }
};

}  // namespace flash_dmattn::internal::cuda::sm90
