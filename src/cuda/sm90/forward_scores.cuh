// What a consumer of the sm90 forward knows of the tiles of keys that it walks over, and how the products of a tile's
// keys and its queries become scores: the scale, the softcap, a bias, and what its rows do not see.
#pragma once

#include <cstdint>

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/hide.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/scores.cuh"
#include "cuda/plan/entry_offset.cuh"
#include "cuda/plan/visibility.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/forward_config.h"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/work_queue.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

template <typename Block>
struct ForwardScores {
  using Config = typename Block::Config;
  using Element = typename Block::Element;
  using Facts = typename Block::Facts;
  static constexpr bool kPlanned = Block::kPlanned;
  static constexpr int kTileKeys = Config::kTileKeys, kKeyNTiles = kTileKeys / 8;
  static constexpr int kStageTiles = kPlanned ? Block::Planned::kStageTiles : 1;  // tiles of the plan
  static_assert(kStageTiles <= 2);

  Block& block;
  int group;  // number of the consumer
  WorkTaker taker;
  Position<Config::kKeyStages> key_at;
  Position<Config::kValueStages> value_at;
  Position<Config::kBiasStages == 0 ? 1 : Config::kBiasStages> bias_at;
  float scores[1][kKeyNTiles][4];
  // The walk over tiles. Dense: the tile, from the last to the first, how many the consumer's rows see, and how many
  // all of them see in full. In a plan: the slot of the stage's facts, its marks, and the thread's bits of its tiles.
  int tile, seen_tiles, full_tiles, slot;
  std::uint32_t marks, seen[kStageTiles];

  __device__ explicit ForwardScores(Block& block)
      : block(block),
        group(static_cast<int>(__reduce_max_sync(~0u, threadIdx.x / kWarpGroup)) - Config::kProducers),
        taker(block.shared.ring),
        slot(0) {}

  __device__ Work& work() const { return block.shared.ring.works[taker.slot()]; }

  // Of the problem, and of a tile of keys (fragments.cuh).
  __device__ static int thread() {
    const int thread = static_cast<int>(threadIdx.x);
    return kPlanned && Config::kValueDim > 192 ? recomputed(thread) : thread;  // all registers are taken
  }
  __device__ int warp_row() const { return thread() / 32 % 4 * 16; }
  __device__ int row_of(int i) const {
    return block.first_row_of(work(), group) + warp_row() + thread() % 32 / 4 + 8 * i;
  }
  __device__ int column_of(int n) const { return 8 * n + 2 * (thread() % 4); }

  // One arrival for the warp group, whose products end together. At the keys of a plan one of every thread: it also
  // says that the thread has read the facts of the stage before. Facts, biases and works are read by the threads
  // themselves, and of what other threads have written, as opposed to the copy engine, each of them hands back its
  // part: of a lane that did so for its warp, compute-sanitizer would not know that the others have read.
  static constexpr int kKeyReleases = kPlanned ? kWarpGroup : 1;
  static constexpr int kBiasReleases = Config::kRowBiased ? 4 : kWarpGroup;
  template <int kStages>
  __device__ void release(Pipeline<kStages>& pipeline, Position<kStages>& at, int releases = 1) {
    if (releases != 1) __syncwarp();
    if (static_cast<int>(threadIdx.x) % (kWarpGroup / releases) == 0) arrive(shared_address(&pipeline.empty[at.stage]));
    at.advance();
  }

  template <int kStages>
  __device__ void wait_full(Pipeline<kStages>& pipeline, const Position<kStages>& at) const {
    wait(shared_address(&pipeline.full[at.stage]), at.parity);
    if constexpr (kPlanned) fence_async_proxy();  // gathered keys were not copied by the products' proxy
  }

  __device__ const Facts& facts() const { return block.planned.facts[slot]; }

  // What one lane of the warp, the one that hands stages and works back, has read, for all. By a reduction, so that the
  // compiler knows it to be the same in all lanes (see begin). If every lane read for itself, only the order of a
  // warp's instructions would keep these reads before what is written next, which compute-sanitizer cannot see.
  template <typename Read>
  __device__ std::uint32_t read_for_warp(Read read) const {
    return __reduce_or_sync(~0u, thread() % 32 == 0 ? read() : 0);
  }

  // In a plan: what the stage's facts say to the thread. Once its keys have come; nothing of its scores is needed.
  __device__ void read_facts() {
    if constexpr (kPlanned) {
      marks = read_for_warp([&] { return facts().marks; });
#pragma unroll
      for (int tile = 0; tile < kStageTiles; ++tile) {
        if (!is_full(tile)) seen[tile] = seen_of(tile);
      }
    }
  }

  // Whether there is a first tile, and then a next one.
  __device__ bool first_tile(int tiles) {
    tile = tiles - 1;
    return kPlanned || tile >= 0;
  }
  __device__ bool is_last_tile() const { return kPlanned ? (marks & Facts::kLast) != 0 : tile == 0; }
  __device__ bool next_tile() {
    if constexpr (kPlanned) {
      slot = slot + 1 == Config::kFactsSlots ? 0 : slot + 1;
      return !is_last_tile();
    } else {
      return --tile >= 0;
    }
  }

  // Of the plan's units of rows, the one that the warp has rows of.
  __device__ int plan_unit() const { return block.params.pairs_heads ? 0 : group; }
  // Whether all its rows see the whole of the stage's tile of the plan.
  __device__ bool is_full(int tile) const { return (marks & Facts::full_mark(tile, plan_unit())) != 0; }

  // What the thread sees of the tile. A word of a key has four bits for a thread, eight apart, of its two rows and its
  // two keys of a column tile. Turned right by the thread's row, these stand where no other column tile has its own, as
  // producers have turned words by the column tile. So one word has all.
  __device__ std::uint32_t seen_of(int tile) const {
    constexpr int kTiles = kPlanTileKeys / 8;
    static_assert(kTiles == 8);
    const int unit_row = 64 * plan_unit() + warp_row(), row = thread() % 32 / 4;
    const std::uint32_t* words = facts().words[unit_row / kWordRows] + unit_row / 16 % 2;
    std::uint32_t all = 0;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const std::uint32_t word = words[column_of(tile * kTiles + n)], own = 0x01010101u << n;
      all = (all & ~own) | (__funnelshift_r(word, word, row) & own);
    }
    return all;
  }

  // Hides what the rows do not see.
  __device__ void hide() {
    if constexpr (kPlanned) {
      hide_listed<0>();
      if constexpr (kStageTiles == 2) hide_listed<1>();
    } else {
      hide_dense();
    }
  }

  // Of the stage's tile kTile of the plan.
  template <int kTile>
  __device__ void hide_listed() {
    if (is_full(kTile)) return;
    constexpr int kFirst = kTile * kPlanTileKeys / 8;
    // Seven bits at a time become predicates (R2P in the machine code), unless the compiler knows which words they come
    // from: it tests them there then, one by one.
    const std::uint32_t bits = recomputed(seen[kTile]);
#pragma unroll
    for (int bit = 0; bit < 32; ++bit) {
      if ((bits & (1u << bit)) == 0) scores[0][kFirst + bit % 8][2 * (bit / 8 % 2) + bit / 16] = -INFINITY;
    }
  }

  // By causal rule and length.
  __device__ void hide_dense() {
    if (tile < full_tiles) return;
    hide_past_limits(
        scores,
        [&](int i) { return causal_limit(block.params.visibility, work().existing, row_of(i)) - tile * kTileKeys; },
        [&](int n) { return column_of(n); }, -INFINITY);
  }

  // Makes scores of products.
  __device__ void make_scores() {
    constexpr Scoring kScoring = Block::kScoring;
    const float scale = block.params.score.outer_scale;
    if constexpr (kScoring == Scoring::kRowBiased) {
      add_row_bias();
    } else if constexpr (kScoring == Scoring::kKeyBiased) {
      add_staged_key_bias();
    } else if constexpr (kScoring == Scoring::kAny) {
      make_any_scores();
    } else if constexpr (kScoring == Scoring::kScaled) {
      if (kPlanned && block.params.bias.defined()) {
        add_key_bias(scale, scores, [&](int n) { return bias_fact(n); });
      } else {
        scale_by(scale, scores);
      }
    }
  }

  __device__ void make_any_scores() {
    const ScoreRule& rule = block.params.score;
    const BroadcastView& bias = block.params.bias;
    if (bias.rows > 1) {
      scale_products(rule, scores);
      cuda::add_row_bias<Element>(
          bias, entry_offset(bias, work().batch, block.head_of(work(), group)), block.params.rows, scores,
          [&](int i) { return row_of(i); },
          [&](int n, int pair) {
            const int column = column_of(n) + pair;
            if constexpr (kPlanned) return facts().key[column];
            const int key = tile * kTileKeys + column;
            return key < work().existing ? key : -1;
          });
      return;
    }
    cap_products(rule, scores);
    if (!bias.defined()) return scale_by(rule.outer_scale, scores);
    if constexpr (kPlanned) {
      add_key_bias(rule.outer_scale, scores, [&](int n) { return bias_fact(n); });
    } else {
      add_staged_key_bias();
    }
  }

  // The bias of a column's key and of the next one's.
  __device__ float2 bias_fact(int n) const { return *reinterpret_cast<const float2*>(facts().bias + column_of(n)); }

  __device__ std::uint32_t bias_stage() const {
    return block.biases + bias_at.stage * static_cast<std::uint32_t>(Config::kBiasBytes);
  }
  __device__ void wait_for_bias() const {
    wait(shared_address(&block.shared.biases.full[bias_at.stage]), bias_at.parity);
  }
  __device__ void release_bias() {
    if constexpr (kBiasReleases != kWarpGroup) __syncwarp();
    if (threadIdx.x % (kWarpGroup / kBiasReleases) == 0) {
      arrive(shared_address(&block.shared.biases.empty[bias_at.stage]));
    }
    bias_at.advance();
  }

  __device__ void add_staged_key_bias() {
    wait_for_bias();
    const std::uint32_t own = bias_stage() + 4 * column_of(0);
    add_key_bias(block.params.score.outer_scale, scores, [&](int n) { return load_shared_float2(own + 32 * n); });
    release_bias();
  }

  // With the roundings of scale_products and of add_row_bias (scores.cuh).
  __device__ void add_row_bias() {
    const float scale = block.params.score.scale;
    wait_for_bias();
    const int lane = thread() % 32;
    const std::uint32_t own = bias_stage() + (kConsumerRows * group + warp_row() + lane / 4) * 128 + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < kKeyNTiles; ++n) {
        // Pieces of eight columns are swizzled by the row, whose number modulo 8 is lane / 4.
        const std::uint32_t pair =
            load_shared(own + n / 8 * Block::kQueryPanel + i * 8 * 128 + ((n % 8) ^ (lane / 4)) * 16);
        const float2 bias = unpack<Element>(pair);
        float* score = pair_at(scores, i, n);
        score[0] = __fadd_rn(__fmul_rn(score[0], scale), bias.x);
        score[1] = __fadd_rn(__fmul_rn(score[1], scale), bias.y);
      }
    release_bias();
  }
};

}  // namespace flash_dmattn::internal::cuda::sm90
