// A consumer of the sm90 forward: a warp group that computes kConsumerRows rows of a work after another. Scores,
// probabilities and sums stay in registers; the other operand of every product is a stage of shared memory.
#pragma once

#include <cstdint>

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/softmax.cuh"
#include "cuda/plan/visibility.cuh"
#include "cuda/ptx/arithmetic.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/forward_scores.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/store_rows.cuh"
#include "cuda/sm90/work_queue.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

template <typename Block>
struct ForwardConsumer : ForwardScores<Block> {
  using Scores = ForwardScores<Block>;
  using Config = typename Block::Config;
  using Element = typename Block::Element;
  static constexpr bool kPlanned = Block::kPlanned;
  static constexpr int kTileKeys = Config::kTileKeys, kConsumers = Config::kConsumers;
  static constexpr int kHeadDim = Config::kHeadDim;
  static constexpr int kKeyNTiles = kTileKeys / 8, kDimNTiles = Config::kValueDim / 8;
  static constexpr std::uint32_t kQueryPanel = Block::kQueryPanel, kTilePanel = Block::kTilePanel;
  using Scores::block, Scores::group, Scores::taker, Scores::key_at, Scores::value_at, Scores::bias_at;
  using Scores::first_tile, Scores::is_last_tile, Scores::next_tile, Scores::make_scores, Scores::hide;
  using Scores::kKeyReleases, Scores::release, Scores::wait_full, Scores::wait_for_bias, Scores::release_bias;
  using Scores::scores;
  using Scores::tile, Scores::seen_tiles, Scores::full_tiles;
  using Scores::work, Scores::thread, Scores::row_of, Scores::read_for_warp, Scores::read_facts;

  float sums[1][kDimNTiles][4];
  float row_max[2], row_sum[2];

  // Of a work's rows: what their sums are to be multiplied by, and whether one of them may be huge.
  struct RowEnds {
    float inverse[2];
    bool huge;
  };

  __device__ explicit ForwardConsumer(Block& block) : Scores(block) {}

  // scores = queries keys^T, under way
  __device__ void multiply_keys() {
    wait_full(block.shared.keys, key_at);
    const std::uint64_t a = matrix_descriptor(block.queries + group * 64 * 128, 16, 1024);
    const std::uint64_t b =
        matrix_descriptor(block.keys + key_at.stage * static_cast<std::uint32_t>(Config::kKeyBytes), 16, 1024);
    wgmma_fence();
#pragma unroll
    for (int depth = 0; depth < kHeadDim / 16; ++depth) {
      wgmma<Element, BRows::kColumns>(scores[0], advanced(a, depth / 4 * kQueryPanel + depth % 4 * 32),
                                      advanced(b, depth / 4 * kTilePanel + depth % 4 * 32), depth != 0);
    }
    wgmma_commit();
  }

  static constexpr int kProducts = kTileKeys / 16;  // of a tile's probabilities and values
  // sums += probabilities values, under way. All products, or from kFirst to kEnd: those from 0 on come first.
  // kReadsFacts: also read_facts for the tile whose scores are under way. Not before some products have been begun, as
  // the tensor cores would have nothing to do; nor after all, as the scores are then nearly there.
  template <int kFirst = 0, int kEnd = kProducts, bool kReadsFacts = false>
  __device__ void add_values(const std::uint32_t (&probabilities)[kKeyNTiles / 2][4]) {
    static_assert(!kReadsFacts || (kFirst <= 1 && kEnd > 1));
    if (kFirst == 0) wait_full(block.shared.values, value_at);
    const std::uint64_t b = matrix_descriptor(
        block.values + value_at.stage * static_cast<std::uint32_t>(Config::kValueBytes), kTilePanel, 1024);
    if (kFirst == 0) wgmma_fence();
#pragma unroll
    for (int depth = kFirst; depth < kEnd; ++depth) {
      wgmma<Element, BRows::kDepth>(sums[0], probabilities[depth], advanced(b, depth * 16 * 128), true);
      if (kReadsFacts && depth == 1) read_facts();
    }
    wgmma_commit();
  }

  __device__ void pack_probabilities(std::uint32_t (&probabilities)[kKeyNTiles / 2][4]) const {
#pragma unroll
    for (int row = 0; row < 2; ++row) pack_row(probabilities, row);
  }
  // Those of the thread's first or second row.
  __device__ void pack_row(std::uint32_t (&probabilities)[kKeyNTiles / 2][4], int row) const {
#pragma unroll
    for (int depth = 0; depth < kKeyNTiles / 2; ++depth)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* pair = pair_at(scores, row, 2 * depth + half);
        probabilities[depth][row + 2 * half] = pack<Element>(pair[0], pair[1]);
      }
  }

  // Values of keys past the length may be anything, and 0 times NaN is NaN: in the one tile that has some, the first of
  // `tiles` that comes, they are overwritten. By all consumers together, before they go their own ways.
  __device__ void clear_missing_values(int tiles) {
    const int existing = work().existing, first_key = (tiles - 1) * kTileKeys;
    if (tiles == 0 || existing == block.params.keys || existing >= first_key + kTileKeys) return;
    wait(shared_address(&block.shared.values.full[value_at.stage]), value_at.parity);
    const std::uint32_t tile_values = block.values + value_at.stage * static_cast<std::uint32_t>(Config::kValueBytes);
    constexpr int kPieces = Config::kValuePanels * 8;
    // Seldom: not worth registers.
#pragma unroll 1
    for (int index = recomputed(static_cast<int>(threadIdx.x)) - kWarpGroup;
         index < (first_key + kTileKeys - existing) * kPieces; index += kConsumers * kWarpGroup) {
      const int row = existing - first_key + index / kPieces, piece = index % kPieces;
      const std::uint32_t address = tile_values + piece / 8 * kTilePanel + row * 128 + piece % 8 * 16;
      store_shared_16(address, {0, 0, 0, 0});
    }
    fence_async_proxy();
    sync_named_barrier(kClearBarrier, kConsumers * kWarpGroup);
  }

  // The same for the first one that the consumer's rows see. Those before it, which other consumers' rows see, are
  // handed back.
  __device__ bool first_seen_tile(int tiles) {
    bool more = first_tile(tiles);
    if constexpr (Config::kSkipsTiles) {
#pragma unroll 1
      for (; more && tile >= seen_tiles; more = next_tile()) {
        wait_full(block.shared.keys, key_at);
        release(block.shared.keys, key_at, kKeyReleases);
        if (block.stages_bias()) {
          wait_for_bias();
          release_bias();
        }
        wait_full(block.shared.values, value_at);
        release(block.shared.values, value_at);
        if (tile < tiles - 1) take_turn(), pass_turn();
      }
    }
    return more;
  }

  // At the tensor cores, so that one consumer multiplies while another exponentiates.
  __device__ void take_turn() {
    if (Config::kTakesTurns) sync_named_barrier(kTurnBarrier + group, 2 * kWarpGroup);
  }
  __device__ void pass_turn() {
    if (Config::kTakesTurns) arrive_named_barrier(kTurnBarrier + (group + 1) % kConsumers, 2 * kWarpGroup);
  }

  // All works of the block. Inlined whatever its size: products may not be under way where functions are called.
  __device__ __forceinline__ void run() {
    // Each consumer takes as many turns as the others: their works have the same tiles.
    if (Config::kTakesTurns && group == kConsumers - 1) pass_turn();
#pragma unroll 1
    while (true) {
      const Work& taken = taker.take();
      const std::uint32_t kind = read_for_warp([&] { return static_cast<std::uint32_t>(taken.kind); });
      if (kind == Work::kNone) break;
      begin();
      wait_for_queries(taker.slot());
      int tiles = 0;
      if constexpr (!kPlanned) {
        const int first_row = block.first_row_of(work(), group);
        const int limit = causal_limit(block.params.visibility, work().existing, first_row);
        tiles = __reduce_max_sync(~0u, block.tile_count(work()));
        seen_tiles = __reduce_max_sync(~0u, block.tile_count(work().existing, first_row, kConsumerRows));
        full_tiles = __reduce_max_sync(~0u, limit / kTileKeys);
        clear_missing_values(tiles);
      }
      if (kind == Work::kUsual) {
        finish(run_over_tiles(tiles));
      } else {
        run_safely_over_tiles(tiles);
        wait_until_stored<Block>();
        store(end_rows());
        taker.release();
      }
    }
    // The turn that the last consumer has passed on: no barrier may be left with threads that have arrived.
    if (Config::kTakesTurns && group == 0) take_turn();
    end_storing<Block>();
  }

  __device__ void begin() {
    // The compiler must know stages to be the same in all lanes, or it copies them into the warp's registers for every
    // product (10 % of the forward): here by a reduction, and then by a loop that all lanes leave together.
    key_at.stage = __reduce_max_sync(~0u, key_at.stage);
    value_at.stage = __reduce_max_sync(~0u, value_at.stage);
    if constexpr (Config::kBiasStages > 0) bias_at.stage = __reduce_max_sync(~0u, bias_at.stage);
    clear(sums);
#pragma unroll
    for (int i = 0; i < 2; ++i) row_max[i] = -INFINITY, row_sum[i] = 0;
  }

  __device__ void wait_for_queries(int work_slot) const {
    wait(shared_address(&block.shared.queries.full[group]), Block::query_parity(work_slot));
  }
  // Once their last product is done, or the output that takes their place is stored.
  __device__ void release_queries() const {
    if (!Block::kStagesInQueries && threadIdx.x % kWarpGroup == 0) {
      arrive(shared_address(&block.shared.queries.empty[group]));
    }
  }
  __device__ void release_staged_queries() const {
    if constexpr (Block::kStagesInQueries) {
      fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) arrive(shared_address(&block.shared.queries.empty[group]));
    }
  }

  __device__ void wait_for_scores() {
    settle(scores[0]);
    release(block.shared.keys, key_at, kKeyReleases);
  }

  template <int kUnderWay = 0>
  __device__ void wait_for_sums() {
    wgmma_wait<kUnderWay>();
    settle(sums[0]);
    release(block.shared.values, value_at);
  }

  // Makes probabilities of the scores of a tile.
  __device__ void exponentiate_scores(std::uint32_t (&probabilities)[kKeyNTiles / 2][4]) {
    float rescale[2];
    exponentiate_rows(block.params.score.multiplier, scores, row_max, row_sum, rescale);
    pack_probabilities(probabilities);
  }

  // What comes between products and probabilities.
  template <bool kHasReadFacts = false>
  __device__ void prepare_scores() {
    wait_for_scores();
    if constexpr (!kHasReadFacts) read_facts();
    if (is_last_tile()) release_queries();
    make_scores();
    hide();
  }

  // Whether all rows of the warp group are calm (softmax.cuh). Its warps go on together, as products have to be begun.
  __device__ bool rows_are_calm() const {
    bool calm = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      calm &= row_of(i) >= block.params.rows || is_calm(block.params.score.multiplier, row_max[i]);
    }
    return __all_sync(~0u, all_at_named_barrier(kCalmBarrier + group, kWarpGroup, calm));
  }

  // A tile's scores, beside the values of the tile before.
  template <bool kCalm>
  __device__ void add_tile(std::uint32_t (&probabilities)[kKeyNTiles / 2][4]) {
    const float multiplier = block.params.score.multiplier;
    constexpr int kEarly = kProducts - (kCalm ? Config::kLateProducts : 0);
    take_turn();
    multiply_keys();
    add_values<0, kEarly, true>(probabilities);
    if (kEarly == kProducts) pass_turn();
    wgmma_wait<1>();
    prepare_scores<true>();
    if constexpr (kEarly < kProducts) {
      add_values<kEarly>(probabilities);
      pass_turn();
    }
    if constexpr (kCalm) {
      // The first row's are packed beside the second row's exponentials: in registers that products read until then.
      bool outgrown = exponentiate_calm_row<Config::kGroupedScores>(multiplier, scores, 0, row_max, row_sum);
      wait_for_sums();
      pack_row(probabilities, 0);
      outgrown |= exponentiate_calm_row<Config::kGroupedScores>(multiplier, scores, 1, row_max, row_sum);
      if (__any_sync(~0u, outgrown)) {
        raise_references(multiplier, scores, row_max, row_sum, sums);
        pack_row(probabilities, 0);
      }
      pack_row(probabilities, 1);
    } else {
      float rescale[2];
      exponentiate_rows(multiplier, scores, row_max, row_sum, rescale);
      wait_for_sums();
      rescale_rows(rescale, sums);
      pack_probabilities(probabilities);
    }
  }

  // Up to the end of the last work of a chain, whose rows are to be stored.
  __device__ RowEnds run_over_tiles(int tiles) {
    if (!first_seen_tile(tiles)) {
      release_queries();
      return end_rows();
    }
    std::uint32_t probabilities[kKeyNTiles / 2][4];
    // A turn for every tile of the work but its first, so that all consumers take as many.
    const bool takes_turn = Config::kSkipsTiles && tile < tiles - 1;
    if (takes_turn) take_turn();
    multiply_keys();
    if (takes_turn) pass_turn();
    wgmma_wait<0>();
    prepare_scores();
    exponentiate_scores(probabilities);
#pragma unroll 1
    while (true) {
      bool more = next_tile();
#pragma unroll 1
      for (; more && !(Config::kHasCalmLoop && rows_are_calm()); more = next_tile()) add_tile<false>(probabilities);
      if constexpr (Config::kHasCalmLoop) {
#pragma unroll 1
        for (; more; more = next_tile()) add_tile<true>(probabilities);
      }
      if (!is_followed()) break;
      // The first scores of the next work are computed while this one ends.
      take_turn();
      add_values(probabilities);
      wait_for_queries(taker.next_slot());
      multiply_keys();
      pass_turn();
      wait_for_sums<1>();
      finish(end_rows());  // earlier, beside these products, does not pay
      begin();
      wgmma_wait<0>();
      prepare_scores();
      exponentiate_scores(probabilities);
    }
    add_values(probabilities);
    const RowEnds ends = end_rows();
    wait_for_sums();
    return ends;
  }

  // Whether another usual work comes after this one, and is to be begun with its end.
  __device__ bool is_followed() const { return Config::kChainsWorks && __any_sync(~0u, work().is_followed); }

  // The end of a usual work.
  __device__ void finish(const RowEnds& ends) {
    const bool huge = ends.huge || has_infinite_sum(sums);
    // By the lane that hands the work back.
    if (__any_sync(~0u, huge) && threadIdx.x % 32 == 0) work().found_huge = true;
    store(ends);
    taker.release();
  }

  // The same for rows that may be huge (softmax.cuh), without haste.
  __device__ void run_safely_over_tiles(int tiles) {
    const ScoreRule& rule = block.params.score;
    std::uint32_t probabilities[kKeyNTiles / 2][4];
    float true_max[2] = {-INFINITY, -INFINITY};
#pragma unroll 1
    for (bool more = first_tile(tiles); more; more = next_tile()) {
      multiply_keys();
      wgmma_wait<0>();
      prepare_scores();
#pragma unroll
      for (int i = 0; i < 2; ++i) shift_huge_row(rule, i, true_max[i], scores, row_max, row_sum, sums);
      update_softmax(rule.multiplier, scores, row_max, row_sum, sums,
                     [&](int i) { return row_maximum(scores, i, row_max[i]); });
      pack_probabilities(probabilities);
      add_values(probabilities);
      wait_for_sums();
    }
    if (!kPlanned && tiles == 0) release_queries();
#pragma unroll
    for (int i = 0; i < 2; ++i) row_max[i] = true_max[i];
  }

  // What can be said of the work's rows before their last product is done, beside which it is worked out; their facts
  // are stored, too.
  __device__ RowEnds end_rows() const {
    const ForwardParams& params = block.params;
    const int head = block.head_of(work(), group);
    RowEnds ends;
    float row_sums[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_sums[i] = row_sum[i] + __shfl_xor_sync(~0u, row_sum[i], 1);
      row_sums[i] += __shfl_xor_sync(~0u, row_sums[i], 2);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool empty = row_max[i] == -INFINITY && row_sums[i] == 0;
      const float inverse_sum = __fdividef(1.0f, sum_with_sink<Element>(params, head, row_max[i], row_sums[i]));
      ends.inverse[i] = empty ? 0.0f : inverse_sum;
    }
    ends.huge = has_huge_reference(params.score.multiplier, row_max, row_sum);
    const unsigned own_thread = static_cast<unsigned>(recomputed(static_cast<int>(threadIdx.x))),
                   lane = own_thread % 32;
    // Of the rows that four lanes share, by a lane each.
    const bool second = lane % 2 != 0;
    const int row = first_row_of_warp(own_thread) + static_cast<int>(lane / 4 + lane % 2 * 8);
    if (lane % 4 < 2 && row < params.rows) {
      const std::int64_t index = (static_cast<std::int64_t>(work().batch) * params.heads + head) * params.rows + row;
      const float highest = second ? row_max[1] : row_max[0], sum = second ? row_sums[1] : row_sums[0];
      store_row_facts(params, index, highest, sum * unrounded(params.score, highest));
    }
    return ends;
  }

  __device__ int first_row_of_warp(unsigned own_thread) const {
    return block.first_row_of(work(), group) + static_cast<int>(own_thread / 32 % 4 * 16);
  }

  // The work's rows. The fewer instructions follow one another the better: the other consumers are about to end, too,
  // so that few products run beside these.
  __device__ void store(const RowEnds& ends) const {
    const unsigned own_thread = static_cast<unsigned>(recomputed(static_cast<int>(threadIdx.x)));
    store_rows(block, group, work(), block.head_of(work(), group), first_row_of_warp(own_thread), ends.inverse, sums);
    release_staged_queries();
  }
};

}  // namespace flash_dmattn::internal::cuda::sm90
