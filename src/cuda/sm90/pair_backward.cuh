// What a consumer of the sm90 backward for wide heads does where two blocks of a cluster own neighbouring tiles of keys
// (BackwardConfig::kPairs): it hands gradients of scores to its twin in the other block, takes those of the twin, and
// adds up half of its columns of queries' gradients over the keys of both. These come a step late, when what the other
// block has made of the step has arrived.
//
// Places of gradients of scores, two by turns, of this block and of the other: consumer 1 may store a step's when
// consumer 0 has stored its probabilities, and so is done with those of the step before last; when all warps of
// consumer 1 are done with these; and when the other block is, which then has its copy, too.
#pragma once

#include <cstdint>

#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/warps.h"

namespace flash_dmattn::internal::cuda::sm90 {

// Of a SplitBackwardConsumer.
template <typename Consumer>
struct PairBackward {
  using Steps = typename Consumer::Steps;
  using Block = typename Steps::BlockType;
  using Config = typename Steps::Config;
  using Element = typename Steps::Element;
  using Facts = typename Steps::Facts;
  using Fragments = typename Steps::Fragments;
  static constexpr bool kOwnsValues = Consumer::kIsFirst;
  static constexpr int kRowNTiles = Steps::kRowNTiles;
  static constexpr std::uint32_t kKeyPanel = Steps::kKeyPanel;

  // Of three panels of columns consumer 0 adds up one, and consumer 1 half of the last one.
  static_assert(Config::kKeyPanels == 3);
  static constexpr int kQueryNTiles = kOwnsValues ? 8 : 4;
  using QueryGradients = float[kQueryNTiles][4];

  Consumer& consumer;
  Steps& steps;
  int last_tile = -1, older_tile = -1;  // of rows, of the last two steps of the work; -1: none

  __device__ explicit PairBackward(Consumer& consumer) : consumer(consumer), steps(consumer.steps) {}

  // ---- Gradients of scores that blocks hand to one another

  __device__ std::uint32_t other_score_gradients_at(std::uint32_t place) const {
    return steps.anew(steps.block.other_score_gradients) + place * static_cast<std::uint32_t>(Config::kScoreBytes);
  }
  __device__ static std::uint32_t parity_of(std::uint32_t step) {
    return Facts::template parity_of<Config::kScoreStages>(step);
  }
  __device__ void wait_for_other(std::uint32_t step) const {
    wait(shared_address(&steps.block.shared.pair.scores_full[Steps::score_place(step)]), parity_of(step));
  }
  // By each warp, whose products with them have ended.
  __device__ void release_other(std::uint32_t step) const {
    __syncwarp();
    if (steps.lane() != 0) return;
    arrive_in_block(
        Block::in_other_block(shared_address(&steps.block.shared.pair.scores_taken[Steps::score_place(step)])));
  }
  // Until the other block is done with what was in the step's place.
  __device__ void wait_until_taken() const {
    const std::uint32_t step = steps.number();
    wait(shared_address(&steps.block.shared.pair.scores_taken[Steps::score_place(step)]), parity_of(step) ^ 1);
  }
  // By each warp, which has stored and fenced those of its keys.
  __device__ void hand_on() const {
    if (steps.lane() != 0) return;
    constexpr std::uint32_t kKeyBytes = 128, kBytes = kWarpRows * kKeyBytes;
    const std::uint32_t place = Steps::score_place(steps.number()),
                        full = shared_address(&steps.block.shared.pair.scores_full[place]),
                        offset = steps.warp_key() * kKeyBytes;
    arrive_expecting(full, kBytes);  // as many come from the other block
    copy_to_block(Block::in_other_block(other_score_gradients_at(place) + offset),
                  steps.score_gradients_at(place) + offset, kBytes, Block::in_other_block(full));
  }

  // ---- Gradients of queries

  // Of that step. Where its gradients of scores are not there yet, nobody takes the result.
  __device__ void begin_query_gradients(std::uint32_t step, QueryGradients& dqueries) const {
    const int rank = Block::rank();
    const std::uint32_t own_panel = kOwnsValues ? rank : 2, other_panel = kOwnsValues ? 0 : 1,
                        half = kOwnsValues ? 0 : rank * 64, place = Steps::score_place(step);
    const std::uint64_t own_a = matrix_descriptor(steps.score_gradients_at(place), 16, 1024),
                        own_b = steps.descriptor(steps.block.keys + own_panel * kKeyPanel + half, kKeyPanel),
                        other_a = matrix_descriptor(other_score_gradients_at(place), 16, 1024),
                        other_b = steps.descriptor(steps.block.other_keys + other_panel * kKeyPanel + half, kKeyPanel);
    wgmma_fence();
    add_products<true>(dqueries, own_a, own_b);
    add_products<false>(dqueries, other_a, other_b);
    wgmma_commit();
  }
  template <bool kOverwrites>
  __device__ static void add_products(QueryGradients& dqueries, std::uint64_t a, std::uint64_t b) {
#pragma unroll
    for (int depth = 0; depth < Config::kTileKeys / 16; ++depth) {
      Steps::template begin_or_add<BRows::kDepth, ARows::kDepth>(
          dqueries, advanced(a, depth * 16 * 128), advanced(b, depth * 16 * 128), !kOverwrites || depth != 0);
    }
  }
  __device__ void add_query_gradients(const QueryGradients& dqueries, int tile) const {
    const int rank = Block::rank();
    const auto results = steps.results();
    float* sums = results.query_sums(kOwnsValues ? rank : 2, tile);
    if (!kOwnsValues) sums += rank * (kQueryNTiles * kWarpGroup * 4);
    results.add_query_gradients(dqueries, 0, sums);
  }
  // Once the products have ended; nothing, if there was no such step.
  __device__ void finish_query_gradients(std::uint32_t step, QueryGradients& dqueries, int tile) const {
    settle(dqueries);
    if (tile < 0) return;
    release_other(step);
    add_query_gradients(dqueries, tile);
  }
  // Those of the last step, at the end of a work.
  __device__ void add_last_query_gradients() {
    QueryGradients dqueries;
    const std::uint32_t last = steps.last_number();
    steps.wait_for_score_gradients(last);
    wait_for_other(last);
    begin_query_gradients(last, dqueries);
    wgmma_wait<0>();
    finish_query_gradients(last, dqueries, last_tile);
  }

  // ---- Steps of a work; the first one exists. As those of a block by itself (SplitBackwardConsumer).

  // Consumer 0: while it makes probabilities, the tensor cores are at gradients of queries.
  __device__ void add_up_values() {
    QueryGradients dqueries;
    typename Steps::template Ahead<kRowNTiles> ahead;
    consumer.begin_steps(ahead);
#pragma unroll 1
    do {
      steps.mark = __reduce_or_sync(~0u, steps.mark);
      if (steps.has(Facts::kStartsHead) && steps.has(Facts::kBiased)) steps.read_key_bias();
      Fragments probabilities;
      steps.make_probabilities(probabilities, ahead);
      const std::uint32_t last_number = steps.last_number();
      wgmma_wait<0>();
      finish_query_gradients(Facts::number_before(last_number), dqueries, older_tile);
      steps.wait_for_score_gradients(last_number);
      consumer.store_probabilities(probabilities);
      steps.add_products(consumer.sums, probabilities, steps.output_gradients());
      const int own_tile = steps.facts().tile, own_stage = steps.stage();
      steps.wait_for_next_step();
      steps.multiply_queries();
      steps.read_ahead(ahead);
      if (last_tile >= 0) wait_for_other(last_number);
      begin_query_gradients(last_number, dqueries);
      wgmma_wait<2>();
      settle(consumer.sums[0]);
      steps.release(own_stage);
      wgmma_wait<1>();
      settle(steps.scores);
      older_tile = last_tile, last_tile = own_tile;
    } while (steps.has(Facts::kExists));
    wgmma_wait<0>();
    finish_query_gradients(Facts::number_before(steps.last_number()), dqueries, older_tile);
    add_last_query_gradients();
  }

  __device__ void add_up_keys() {
    QueryGradients dqueries;
    float gradients[kRowNTiles][4];
    consumer.begin_steps(gradients);
#pragma unroll 1
    do {
      steps.mark = __reduce_or_sync(~0u, steps.mark);
      if (steps.has(Facts::kStartsHead)) steps.results().start_sums_of_head();  // consumer 1 needs no bias
      const std::uint32_t last_number = steps.last_number();
      Fragments probabilities, packed;
      consumer.take_probabilities(probabilities);
      steps.make_score_gradients(probabilities, typename Steps::template Pairs<0>{}, gradients);
      steps.pack_score_gradients(gradients, packed);
      sync_named_barrier(kMeetBarrier, kWarpGroup);
      wait_until_taken();
      steps.store_score_gradients(packed);
      steps.publish_score_gradients();
      hand_on();
      steps.add_products(consumer.sums, packed, steps.queries());
      const int own_tile = steps.facts().tile, own_stage = steps.stage();
      if (last_tile >= 0) wait_for_other(last_number);
      begin_query_gradients(last_number, dqueries);
      wgmma_wait<1>();
      settle(consumer.sums[0]);
      steps.release(own_stage);
      steps.wait_for_next_step();
      steps.multiply_output_gradients(gradients);
      wgmma_wait<1>();
      finish_query_gradients(last_number, dqueries, last_tile);
      last_tile = own_tile;
      wgmma_wait<0>();
      settle(gradients);
    } while (steps.has(Facts::kExists));
    add_last_query_gradients();
    if (steps.has(Facts::kSumsKeyBias)) steps.results().flush_key_bias_gradients(steps.results().head());
  }
};

}  // namespace flash_dmattn::internal::cuda::sm90
