// What producers and consumers of a block of the sm90 backward share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/attention/key_block.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/row_walk.cuh"
#include "cuda/plan/visibility.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/pipeline.cuh"
#include "cuda/sm90/query_turns.cuh"
#include "cuda/sm90/step_facts.cuh"
#include "cuda/sm90/words_ahead.cuh"

namespace flash_dmattn::internal::cuda::sm90 {

// kItsAbsent: marks that no step of the call has. Their code is left out: it would not be run, but stand between
// what is. Without all that can be absent the loop over steps is half as long.
template <typename ElementType, int kHeadDim, int kValueDim, bool kIsPlanned, std::uint32_t kItsAbsent>
struct BackwardBlock {
  using Element = ElementType;
  static constexpr bool kRowBiased = (kItsAbsent & kRowBiasMark) == 0;
  using Config = BackwardConfig<kHeadDim, kValueDim, kRowBiased>;
  using Facts = StepFacts<Config>;
  static constexpr bool kPlanned = kIsPlanned;
  static constexpr std::uint32_t kAbsent = kItsAbsent;
  // Whether dquery of steps whose rows are met once is stored.
  static constexpr bool kStoresQueries =
      kPlanned && Config::kMayStoreQueries && (kAbsent & Facts::kTakesTurns) != 0 && (kAbsent & Facts::kMetOnce) == 0;
  static constexpr bool kIsPlain = (kAbsent & Facts::kBiased) != 0 && !kRowBiased;
  static constexpr bool kReadsWordsAhead = kPlanned && Config::kReadsWordsAhead;
  // Whether the block is one of two that share works (BackwardConfig::kPairs).
  static constexpr bool kPaired = Config::kPairs && (kAbsent & Facts::kTakesTurns) != 0;
  static constexpr int kTileRows = Config::kTileRows, kTileKeys = Config::kTileKeys, kStages = Config::kStages,
                       kBlocks = kPaired ? 2 : 1, kWorkKeys = kBlocks * kTileKeys;
  // Bytes from one panel of 64 columns to the next.
  static constexpr std::uint32_t kKeyPanel = kTileKeys * 128, kRowPanel = kTileRows * 128;
  using Walk = RowWalk<kTileRows, kWorkKeys, kPlanned>;
  using Step = typename Walk::Step;

  // A tile of keys, which the blocks of a pair divide.
  struct Work {
    KeyBlock block;
    int existing;
    int earlier_of_key_head, earlier_of_share;  // works, of entries before, that a deterministic backward waits for
    std::int32_t key[kTileKeys];                // -1: none, or no row sees it, and the tile holds zeros
  };

  // What one block of a pair hands to the other.
  struct Pair {
    // The place of a work, which the first block finds for both, by the number of the work; and whether the second one
    // has brought the keys of the work before last.
    std::int32_t place[2];
    std::uint64_t place_full[2], place_empty[2];
    std::int32_t keys[2][kTileKeys];  // of the other block, as Work::key
    std::uint64_t keys_full[2];
    std::uint64_t scores_full[Config::kScoreStages];   // the other block's gradients of scores are there
    std::uint64_t scores_taken[Config::kScoreStages];  // the other block is done with this one's

    __device__ void init() {
      for (std::uint64_t& full : place_full) init_barrier(shared_address(&full), 1);
      for (std::uint64_t& empty : place_empty) init_barrier(shared_address(&empty), Config::kProducerWarps);
      for (std::uint64_t& full : keys_full) init_barrier(shared_address(&full), 1);
      for (std::uint64_t& full : scores_full) init_barrier(shared_address(&full), 4);
      for (std::uint64_t& taken : scores_taken) init_barrier(shared_address(&taken), 4 * Config::kConsumers);
    }
  };
  struct Alone {
    __device__ void init() {}
  };
  // A bias that differs by row: of a step, each consumer's keys by themselves.
  struct RowBias {
    Pipeline<1> consumers[Config::kConsumers];
    std::uint32_t steps_brought;
    // Of steps, by number: where their scores are in the tensor. Read when the next step is under way.
    struct Place {
      int first_row, head;
    } places[Facts::kNumbers];

    __device__ void init() {
      steps_brought = 0;
      for (auto& pipeline : consumers) pipeline.init(1, 4);
    }
  };

  struct Shared {
    Pipeline<kStages> steps;
    Pipeline<1> keys;                                          // of a work, and its values
    std::uint64_t works_full[2];                               // which work it is, is known
    std::uint64_t works_empty[2];                              // consumers are done with it
    std::uint64_t score_gradients_full[Config::kScoreStages];  // all consumers that make them have stored theirs
    std::uint64_t probabilities_full;                          // of the step, if consumers hand them on
    Facts facts[kStages];
    Work works[2];                                // that of the consumers, and the next one
    std::uint32_t taken[Config::kProducerWarps];  // works, of each of them
    RowRange range[kTileKeys];
    RowRange common_range[Config::kProducerWarps];  // of those of each warp's keys that any row sees
    WordsAhead<Config> words;
    float bias[kTileKeys];  // of the head of the consumers' step, if it is the same for every row
    Walk walks[Config::kProducerWarps];
    // Of steps that are met once, by number: read when those after them are under way, and their stages used again.
    StepRows rows_met_once[Facts::kNumbers];
    static_assert(Facts::kNumbers - 2 * Facts::kLeftOut >= kStages + 3);
    QueryTurns<Config> turns;           // of a deterministic backward
    int head;                           // of the step that was brought last
    std::uint32_t number;               // of the next one
    int heads[4 * Config::kConsumers];  // of each consumer's warp: of the steps that it adds up for a bias's gradient
    std::uint32_t marks;                // those of the call
    bool has_unseen_row;                // the call has one
    std::conditional_t<kPaired, Pair, Alone> pair;
    std::conditional_t<kRowBiased, RowBias, Alone> row_bias;
  };
  // Of the other block of a pair: two panels of its keys, and gradients of its scores.
  static constexpr std::size_t kOtherKeyBytes = kPaired ? 2 * kKeyPanel : 0,
                               kOtherBytes = kPaired ? kOtherKeyBytes + Config::kScoreStages * Config::kScoreBytes : 0;
  static constexpr std::size_t kSharedBytes = Config::kTilesBytes + kOtherBytes + sizeof(Shared);
  static_assert(kSharedBytes <= kWideSharedBytes);

  const BackwardParams& params;
  const BackwardMaps& maps;
  std::uint32_t keys, values, queries, score_gradients, probabilities, biases;  // in shared memory
  std::uint32_t other_keys, other_score_gradients;                              // likewise, of a pair
  Shared& shared;

  __device__ BackwardBlock(const BackwardParams& params, const BackwardMaps& maps, unsigned char* memory)
      : params(params),
        maps(maps),
        keys(shared_address(memory)),
        values(keys + static_cast<std::uint32_t>(Config::kKeyBytes)),
        queries(values + static_cast<std::uint32_t>(Config::kValueBytes)),
        score_gradients(queries + static_cast<std::uint32_t>(kStages * Config::kRowBytes)),
        probabilities(score_gradients + static_cast<std::uint32_t>(Config::kScoreStages * Config::kScoreBytes)),
        biases(probabilities + static_cast<std::uint32_t>(Config::kProbabilityBytes)),
        other_keys(shared_address(memory + Config::kTilesBytes)),
        other_score_gradients(other_keys + static_cast<std::uint32_t>(kOtherKeyBytes)),
        shared(*reinterpret_cast<Shared*>(memory + Config::kTilesBytes + kOtherBytes)) {}

  __device__ void init() const {
    if (threadIdx.x == 0) {
      shared.number = 0;
      shared.turns.init();
      shared.marks = (Facts::marks_of(params) & ~(kAbsent & Facts::kTakesTurns)) |
                     (params.row_flags->has_large_row != 0 ? Facts::kLargeRows : 0);
      if constexpr (kRowBiased) shared.marks |= maps.stores_dbias ? Facts::kStoresRowBias : 0u;
      shared.has_unseen_row = params.row_flags->has_unseen_row != 0;
      // Every thread that writes or reads what is known of a step, or of a work, hands it on itself: if one lane did so
      // for its warp, compute-sanitizer would not know that the others have.
      shared.steps.init(32 * Config::kProducerWarps, Config::kConsumers * kWarpGroup);
      shared.keys.init(32 * Config::kProducerWarps, 4 * Config::kConsumers);
      for (std::uint64_t& full : shared.works_full) init_barrier(shared_address(&full), 32);
      for (std::uint64_t& empty : shared.works_empty) {
        init_barrier(shared_address(&empty), Config::kConsumers * kWarpGroup);
      }
      for (std::uint64_t& full : shared.score_gradients_full)
        init_barrier(shared_address(&full), Config::kSplitsGradients ? kWarpGroup : 4 * Config::kConsumers);
      init_barrier(shared_address(&shared.probabilities_full), kWarpGroup);
      shared.row_bias.init();
      shared.pair.init();
      fence_barrier_init();
    }
    __syncthreads();
    if constexpr (kPaired) sync_cluster();
  }

  // The number of the block in its pair, and where the other one has what this one has at an address.
  __device__ static int rank() { return kPaired ? block_rank() : 0; }
  __device__ static std::uint32_t in_other_block(std::uint32_t address) {
    return address_in_block(address, rank() ^ 1);
  }
  // The first of the block's keys in the work's list or range.
  __device__ static int first_position(const KeyBlock& block) { return block.tile * kWorkKeys + rank() * kTileKeys; }

  __device__ std::uint32_t queries_at(int stage) const {
    return queries + stage * static_cast<std::uint32_t>(Config::kRowBytes);
  }
  __device__ std::uint32_t output_gradients_at(int stage) const {
    return queries_at(stage) + static_cast<std::uint32_t>(Config::kQueryBytes);
  }
};

}  // namespace flash_dmattn::internal::cuda::sm90
