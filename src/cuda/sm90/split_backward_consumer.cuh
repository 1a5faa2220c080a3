// A consumer of the sm90 backward for wide heads: both consumers own all keys of the block, of which a gradient as wide
// as the head fills one's registers. Consumer 0 makes probabilities and adds up the gradients of values; consumer 1
// takes the probabilities, makes gradients of scores of them and adds up those of keys. Each adds some columns of
// queries' gradients to global memory.
//
// Who may write what when follows from the barriers of one step, so that places need none of their own to be empty:
// consumer 0 stores probabilities once all gradients of the last step's scores are stored, and so its probabilities
// read; consumer 1 stores gradients of scores, in one of two places by turns, once it has the step's probabilities:
// consumer 0 has stored these after its products with what was in that place, and has waited before for the warps of
// consumer 1 to be done with theirs.
#pragma once

#include <cstdint>

#include "cuda/attention/fragments.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/backward_steps.cuh"
#include "cuda/sm90/pair_backward.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

// kOwnsValues: consumer 0.
template <typename Block, std::uint32_t kAbsent, bool kOwnsValues>
struct SplitBackwardConsumer {
  using Steps = BackwardSteps<Block, kAbsent>;
  using Config = typename Steps::Config;
  using Facts = typename Steps::Facts;
  using Fragments = typename Steps::Fragments;
  static constexpr bool kIsFirst = kOwnsValues;
  static constexpr int kRowNTiles = Steps::kRowNTiles, kQueryNTiles = Steps::kQueryNTiles,
                       kDimNTiles = kOwnsValues ? Steps::kValueNTiles : Steps::kKeyNTiles;

  // The columns of queries' gradients come in panels, of which consumer 0 makes the first ones.
  static constexpr int kPanels = Config::kKeyPanels, kFirstPanels = (kPanels + 1) / 2;

  Steps steps;
  float sums[1][kDimNTiles][4];  // dvalue or dkey

  __device__ explicit SplitBackwardConsumer(Block& block) : steps(block) {}

  // All works of the block.
  __device__ void run() {
    steps.wait_for_step(0, 0);
#pragma unroll 1
    while (!steps.has(Facts::kDone)) {
      run_work();
      steps.release_work();
      steps.wait_for_next_step();
    }
  }

  __device__ void run_work() {
    clear(sums);
    settle(sums[0]);  // cleared before products begin
    steps.wait_for_keys();
    const bool any = steps.has(Facts::kExists);
    if (any) {
      if constexpr (Block::kPaired && kOwnsValues) {
        PairBackward<SplitBackwardConsumer>(*this).add_up_values();
      } else if constexpr (Block::kPaired) {
        PairBackward<SplitBackwardConsumer>(*this).add_up_keys();
      } else if constexpr (kOwnsValues) {
        add_up_values();
      } else {
        add_up_keys();
      }
    } else if (!kOwnsValues) {
      steps.results().pass_turns_of_bias();
    }
    steps.release_keys();
    const BackwardParams& params = steps.block.params;
    if constexpr (kOwnsValues) {
      store_or_add(params.wants_dvalue, any, params.dvalue, params.value_dim, params.dvalue_sums, 1);
    } else {
      store_or_add(params.wants_dkey, any, params.dkey, params.head_dim, params.dkey_sums, params.score.scale);
    }
  }

  // `any`: there is something to add.
  __device__ void store_or_add(bool wanted, bool any, const TokenView& target, int columns, float* target_sums,
                               float factor) {
    const auto results = steps.results();
    if (results.is_segment()) {
      if (!wanted) return;
      if (any) results.add_segment(sums, steps.group);
      if (!results.is_last_segment()) return;
      results.take_segments(sums, steps.group);
    }
    if (!results.stores()) {
      results.await_turn_of_keys();
      if (wanted && any) results.add_up(sums, target_sums, factor);
      results.pass_turn_of_keys();
    } else if (wanted) {
      results.store(sums, target, columns, factor);
    }
  }

  // ---- Probabilities, on their way from consumer 0 to 1: packed, in the order of the registers

  __device__ std::uint32_t probabilities_at(int depth) const {
    return steps.anew(steps.block.probabilities) + (depth * kWarpGroup + steps.thread() % kWarpGroup) * 16;
  }
  __device__ std::uint32_t probabilities_full() const { return shared_address(&steps.block.shared.probabilities_full); }

  __device__ void store_probabilities(const Fragments& probabilities) const {
#pragma unroll
    for (int depth = 0; depth < kRowNTiles / 2; ++depth) store_shared_16(probabilities_at(depth), probabilities[depth]);
    arrive(probabilities_full());
  }

  __device__ void take_probabilities(Fragments& probabilities) const {
    wait(probabilities_full(), steps.number() % 2);
#pragma unroll
    for (int depth = 0; depth < kRowNTiles / 2; ++depth) load_shared_16(probabilities[depth], probabilities_at(depth));
  }

  // ---- Gradients of queries: panel `part` of those of a step

  template <bool kReuses = false>
  __device__ void begin_query_gradients(std::uint32_t step, int part, float (&dqueries)[kQueryNTiles][4]) const {
    steps.template multiply_score_gradients<kReuses>(step, part, dqueries);
  }

  // ---- Steps; the first one exists

  // What consumer 0 begins a work with: scores, and what is read before sums are sent to memory, behind which it would
  // wait.
  __device__ void begin_steps(typename Steps::template Ahead<kRowNTiles>& ahead) {
    steps.multiply_queries();
    steps.read_ahead(ahead);
    wgmma_wait<0>();
    settle(steps.scores);
  }
  // Likewise consumer 1: gradients of probabilities, and the first head that sums of the bias are of.
  __device__ void begin_steps(float (&gradients)[kRowNTiles][4]) {
    if (steps.lane() == 0) steps.results().head() = steps.facts().head;
    __syncwarp();
    steps.multiply_output_gradients(gradients);
    wgmma_wait<0>();
    settle(gradients);
  }

  // Gradients of queries come a step late: those of scores, which consumer 1 makes, have then been there for a while.
  // Behind the last step the next one's scores are computed, too: from whatever is there, and for nobody.
  __device__ void add_up_values() {
    static_assert(kFirstPanels == 2);
    float dqueries[kQueryNTiles][4];
    int last_tile = -1;  // of the step before
    typename Steps::template Ahead<kRowNTiles> ahead;
    begin_steps(ahead);
#pragma unroll 1
    do {
      // As in wait_for_step: the compiler forgets it from one round to the next.
      steps.mark = __reduce_or_sync(~0u, steps.mark);
      if (steps.has(Facts::kStartsHead) && steps.has(Facts::kBiased)) steps.read_key_bias();
      Fragments probabilities;
      steps.make_probabilities(probabilities, ahead);
      steps.wait_for_score_gradients(steps.last_number());
      store_probabilities(probabilities);
      begin_query_gradients(steps.last_number(), 0, dqueries);
      steps.add_products(sums, probabilities, steps.output_gradients());
      const int own_tile = steps.facts().tile, own_stage = steps.stage();
      wgmma_wait<1>();
      settle(dqueries);
      if (last_tile >= 0) {
        steps.wait_for_turn(steps.last_number());
        steps.results().add_query_gradients(dqueries, 0, last_tile);
      }
      begin_query_gradients<true>(steps.last_number(), 1, dqueries);
      wgmma_wait<1>();
      settle(sums[0]);
      steps.release(own_stage);
      steps.wait_for_next_step();
      steps.multiply_queries();
      wgmma_wait<1>();
      settle(dqueries);
      steps.read_ahead(ahead);
      if (last_tile >= 0) {
        steps.results().add_query_gradients(dqueries, 1, last_tile);
        steps.pass_turn(Facts::number_before(steps.last_number()));
      }
      last_tile = own_tile;
      wgmma_wait<0>();
      settle(steps.scores);
    } while (steps.has(Facts::kExists));
    steps.wait_for_score_gradients(steps.last_number());
    steps.wait_for_turn(steps.last_number());
    add_last_query_gradients(0, last_tile);
    add_last_query_gradients(1, last_tile);
    steps.pass_turn(steps.last_number());
  }

  __device__ void add_last_query_gradients(int part, int tile) {
    float dqueries[kQueryNTiles][4];
    begin_query_gradients(steps.last_number(), part, dqueries);
    wgmma_wait<0>();
    settle(dqueries);
    settle(sums[0]);
    steps.results().add_query_gradients(dqueries, part, tile);
  }

  __device__ void add_up_keys() {
    float gradients[kRowNTiles][4], dqueries[kQueryNTiles][4];
    begin_steps(gradients);
#pragma unroll 1
    do {
      steps.mark = __reduce_or_sync(~0u, steps.mark);
      if (steps.has(Facts::kStartsHead)) steps.results().start_sums_of_head();  // consumer 1 needs no bias
      Fragments probabilities, packed;
      take_probabilities(probabilities);
      steps.make_score_gradients(probabilities, typename Steps::template Pairs<0>{}, gradients);
      steps.pack_score_gradients(gradients, packed);
      steps.store_score_gradients(packed);
      steps.publish_score_gradients();
      steps.add_products(sums, packed, steps.queries());
      const int own_tile = steps.facts().tile, own_stage = steps.stage();
      steps.wait_for_score_gradients(steps.number());  // of the other warps
      begin_query_gradients(steps.number(), kFirstPanels, dqueries);
      wgmma_wait<1>();
      settle(sums[0]);
      steps.release(own_stage);
      steps.wait_for_next_step();
      steps.multiply_output_gradients(gradients);
      wgmma_wait<1>();
      settle(dqueries);
      steps.wait_for_turn(steps.last_number());
      steps.results().add_query_gradients(dqueries, kFirstPanels, own_tile);
      if constexpr (kPanels > kFirstPanels + 1) {
        begin_query_gradients<true>(steps.last_number(), kFirstPanels + 1, dqueries);
        wgmma_wait<0>();
        settle(dqueries);
        steps.results().add_query_gradients(dqueries, kFirstPanels + 1, own_tile);
      } else {
        wgmma_wait<0>();
      }
      steps.pass_turn(steps.last_number());
      settle(gradients);
    } while (steps.has(Facts::kExists));
    if (steps.has(Facts::kSumsKeyBias)) steps.results().flush_key_bias_gradients(steps.results().head());
  }
};

}  // namespace flash_dmattn::internal::cuda::sm90
