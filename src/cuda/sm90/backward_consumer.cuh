// A consumer of the sm90 backward: a warp group that owns kConsumerKeys keys of the block. Gradients of its keys and
// values stay in registers for the whole walk; those of queries are added up in global memory.
#pragma once

#include "cuda/attention/fragments.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_steps.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

template <typename Block, std::uint32_t kAbsent>
struct BackwardConsumer {
  using Steps = BackwardSteps<Block, kAbsent>;
  using Config = typename Steps::Config;
  using Facts = typename Steps::Facts;
  using Fragments = typename Steps::Fragments;
  static constexpr int kRowNTiles = Steps::kRowNTiles, kQueryNTiles = Steps::kQueryNTiles;
  using Asks = typename Config::Asks;
  static constexpr Asks kAsks = Config::asks(Block::kPlanned, Block::kIsPlain);
  static constexpr bool kReleasesKeysEarly = Config::releases_keys_early(Block::kIsPlain);

  Steps steps;
  float dkeys[1][Steps::kKeyNTiles][4], dvalues[1][Steps::kValueNTiles][4];

  __device__ explicit BackwardConsumer(Block& block) : steps(block) {}

  // All works of the block.
  __device__ void run() {
    steps.wait_for_step(0, 0);
#pragma unroll 1
    while (!steps.has(Facts::kDone)) {
      run_work();
      steps.release_work();
      steps.wait_for_next_step();
      steps.results().wait_until_read();
    }
  }

  __device__ void run_work() {
    clear(dkeys);
    clear(dvalues);
    settle(dkeys[0]);  // cleared before products begin
    settle(dvalues[0]);
    steps.wait_for_keys();
    const bool any = steps.has(Facts::kExists);
    if (any) {
      run_steps();
    } else {
      steps.results().pass_turns_of_bias();
    }
    if (!kReleasesKeysEarly || !any) steps.release_keys();
    store_results(any);
  }

  // `any`: there is something to add.
  __device__ void store_results(bool any) {
    const auto results = steps.results();
    const BackwardParams& params = steps.block.params;
    if (results.is_segment()) {
      if (any && params.wants_dkey) results.add_segment(dkeys, 0);
      if (any && params.wants_dvalue) results.add_segment(dvalues, 1);
      if (!results.is_last_segment()) return;
      if (params.wants_dkey) results.take_segments(dkeys, 0);
      if (params.wants_dvalue) results.take_segments(dvalues, 1);
    }
    if (!results.stores()) {
      results.await_turn_of_keys();
      if (any && params.wants_dkey) results.add_up(dkeys, params.dkey_sums, params.score.scale);
      if (any && params.wants_dvalue) results.add_up(dvalues, params.dvalue_sums, 1);
      results.pass_turn_of_keys();
      return;
    }
    if constexpr (Config::kStoresBoxes) {
      if (params.wants_dkey) results.store_boxes(dkeys, 0, steps.block.maps.dkey, params.score.scale);
      if (params.wants_dvalue) results.store_boxes(dvalues, 1, steps.block.maps.dvalue, 1);
    } else {
      if (params.wants_dkey) results.store(dkeys, params.dkey, params.head_dim, params.score.scale);
      if (params.wants_dvalue) results.store(dvalues, params.dvalue, params.value_dim, 1);
    }
  }

  // One consumer at a time begins a block of products: those of gradients of queries and keys, and of the next step's
  // scores. The other makes probabilities and gradients of scores meanwhile.
  __device__ void take_turn() const { sync_named_barrier(kTurnBarrier + steps.group, Config::kConsumers * kWarpGroup); }
  __device__ void pass_turn() const {
    arrive_named_barrier(kTurnBarrier + (steps.group + 1) % Config::kConsumers, Config::kConsumers * kWarpGroup);
  }

  // All steps of the work; the first one exists. Those that store dquery have a loop of their own: in the other one
  // that code, skipped at most steps, would take 5 to 10 % of the time.
  __device__ void run_steps() {
    if (steps.lane() == 0) steps.results().head() = steps.facts().head;
    __syncwarp();
    if constexpr (Block::kStoresQueries) {
#pragma unroll 1
      while (true) {
        if (steps.has(Facts::kMetOnce)) {
          run_like_steps<true>();
        } else {
          run_like_steps<false>();
        }
        if (!steps.has(Facts::kExists)) break;
        // Turns begin anew when those of these steps have ended.
        sync_named_barrier(kMeetBarrier, Config::kConsumers * kWarpGroup);
      }
    } else {
      run_like_steps<false>();
    }
    if (steps.has(Facts::kSumsKeyBias)) steps.results().flush_key_bias_gradients(steps.results().head());
  }

  // Steps up to the next one that, unlike these, stores dquery or does not. Gradients of queries are computed a step
  // late: those of scores, which they take from both consumers, have then been there for a while, and neither has to
  // wait for the other.
  //
  // What a warp asks of memory, of a barrier too, waits behind the products that it has issued: until the last of them
  // has begun. So the next step's scores begin as soon as gradients are there, before these are added to memory, and
  // what they need to know is asked for earlier.
  template <bool kMetOnce>
  __device__ __forceinline__ void run_like_steps() {
    if constexpr (Block::kStoresQueries) {
      settle(dkeys[0]);  // else the compiler has them elsewhere in each loop
      settle(dvalues[0]);
    }
    int tile = -1;  // of the step before
    if (steps.group == Config::kConsumers - 1) pass_turn();
    steps.multiply_queries();
    typename Steps::template Ahead<Config::early_pairs(Block::kPlanned, Block::kIsPlain)> ahead;
    steps.read_ahead(ahead);
#pragma unroll 1
    while (true) {
      // As in wait_for_step: the compiler forgets it from one round to the next.
      steps.mark = __reduce_or_sync(~0u, steps.mark);
      if (steps.has(Facts::kStartsHead)) {
        steps.start_head();
        steps.read_ahead(ahead);  // again: nothing else is kept in registers over that
      }
      float gradients[kRowNTiles][4], dqueries[kQueryNTiles][4];
      steps.multiply_output_gradients(gradients);
      wgmma_wait<1>();
      settle(steps.scores);
      Fragments probabilities, packed;
      steps.make_probabilities(probabilities, ahead);
      std::uint32_t next_mark = 0;
      if (kAsks == Asks::kBeforeProductsForValues) next_mark = steps.next_mark();
      typename Steps::template Pairs<Config::early_deltas(Block::kPlanned, Block::kIsPlain)> deltas;
      steps.read_pairs(deltas, steps.facts().rows.delta);
      steps.add_products(dvalues, probabilities, steps.output_gradients());
      if (kAsks == Asks::kOnceTheyAreIssued) next_mark = steps.next_mark();
      wgmma_wait<1>();
      settle(gradients);
      steps.make_score_gradients(probabilities, deltas, gradients);
      steps.pack_score_gradients(gradients, packed);
      steps.wait_for_score_gradients(steps.last_number());
      if (tile >= 0) steps.store_row_bias_gradients(steps.last_number());
      if (!Config::kStoresScoresLate) steps.store_score_gradients(packed);
      const int last_tile = tile, own_stage = steps.stage();
      const std::uint32_t last_number = steps.last_number();
      tile = steps.facts().tile;
      if (kAsks == Asks::kOnceScoreGradientsAreStored) next_mark = steps.next_mark();
      next_mark = __reduce_or_sync(~0u, next_mark);
      take_turn();
      steps.multiply_score_gradients(last_number, steps.group, dqueries);
      steps.add_products(dkeys, packed, steps.queries());
      if (Config::kStoresScoresLate) steps.store_score_gradients(packed);
      steps.publish_score_gradients();
      float* sums = steps.results().query_sums(steps.group, last_tile);
      // Found here, where the compiler would do so later.
      if (Config::finds_sums_early(Block::kIsPlain)) sums = recomputed(sums);
      const auto end_step = [&] {
        // Turns at sums count steps by it: with these not before a step's are added.
        const bool releases_early = !steps.has(Facts::kTakesTurns);
        if (releases_early) steps.release(own_stage);
        if (last_tile >= 0) {
          steps.wait_for_turn(last_number);
          give_query_gradients<kMetOnce>(dqueries, last_number, sums);
          steps.pass_turn(last_number);
        }
        if (!releases_early) steps.release(own_stage);
        pass_turn();
      };
      // From here on of the next step, if there is one.
      steps.mark = next_mark;
      steps.read_ahead(ahead);
      const auto wait_for_products = [&] {
        wgmma_wait<0>();
        settle(dqueries);
      };
      if (!Config::kBranchesEarly) wait_for_products();
      if (!steps.is_step(kMetOnce)) {
        if (Config::kBranchesEarly) wait_for_products();
        end_step();
        break;
      }
      if (Config::kBranchesEarly) wait_for_products();
      steps.multiply_queries();
      end_step();
    }
    end_last_step<kMetOnce>(tile);
    if (steps.group == 0) take_turn();  // that is left over: no barrier may be left with threads that have arrived
  }

  template <bool kMetOnce>
  __device__ void end_last_step(int tile) {
    float dqueries[kQueryNTiles][4];
    steps.wait_for_score_gradients(steps.last_number());
    steps.store_row_bias_gradients(steps.last_number());
    steps.multiply_score_gradients(steps.last_number(), steps.group, dqueries);
    wgmma_wait<0>();
    settle(dqueries);
    settle(dkeys[0]);
    settle(dvalues[0]);
    if (kReleasesKeysEarly && !steps.has(Facts::kExists)) steps.release_keys();  // no product needs them any more
    steps.wait_for_turn(steps.last_number());
    give_query_gradients<kMetOnce>(dqueries, steps.last_number(), steps.results().query_sums(steps.group, tile));
    steps.pass_turn(steps.last_number());
  }

  // Those of the step with that number.
  template <bool kMetOnce>
  __device__ void give_query_gradients(const float (&dqueries)[kQueryNTiles][4], std::uint32_t step, float* sums) {
    if constexpr (kMetOnce) {
      steps.results().store_query_gradients(dqueries, steps.group, step);
    } else {
      steps.results().add_query_gradients(dqueries, steps.group, sums);
    }
  }
};

}  // namespace flash_dmattn::internal::cuda::sm90
