// Tile sizes of the sm90 backward and what they cost.
#pragma once

#include <cstddef>

#include "cuda/plan/visibility.h"
#include "cuda/sm90/warps.h"

namespace flash_dmattn::internal::cuda::sm90 {

// Buckets of head dims that have a backward.
constexpr int kLeastBackwardBucket = 64, kMostBackwardBucket = 256;
constexpr bool has_backward(int bucket) { return bucket >= kLeastBackwardBucket && bucket <= kMostBackwardBucket; }

// Whether heads of a bucket have a backward with a bias that differs by row, which comes in boxes of a step's rows and
// of the block's keys, as the gradients of the step's scores go. Wide heads have no registers left for that, nor has
// head dim 64, whose steps have twice as many scores.
constexpr bool has_row_biased_backward(int bucket) { return bucket == 96 || bucket == 128; }

// One warp group brings tiles of queries and output gradients. Each of the others, consumers, owns kConsumerKeys keys;
// of wide heads they own the same ones, one the gradient of keys, one that of values.
template <int kHeadDimBucket, int kValueDimBucket, bool kIsRowBiased = false>
struct BackwardConfig {
  static constexpr bool kRowBiased = kIsRowBiased;
  static constexpr int kHeadDim = kHeadDimBucket, kValueDim = kValueDimBucket;
  static_assert(kValueDim <= kHeadDim);
  static constexpr bool kSplitsGradients = kHeadDim > 128;
  // Whether the consumer that owns the gradient of values has registers to spare, which producers get.
  static constexpr bool kHasNarrowValues = kSplitsGradients && kValueDim <= 128;
  static constexpr int kConsumerKeys = 64, kConsumers = 2, kTileKeys = kConsumerKeys * (kSplitsGradients ? 1 : 2);
  // Whether two blocks, a cluster, own neighbouring tiles of keys, unless they take turns: they walk over the same
  // rows, hand each other the gradients of scores, and each adds up half of the columns of queries' gradients over the
  // keys of both. That is half of what L2 has to add, which wide heads would wait for.
  static constexpr bool kPairs = kHasNarrowValues;
  // Of a step: a unit of the plan, or two where registers allow.
  static constexpr int kTileRows = kHeadDim <= 64 ? 128 : 64;
  static constexpr int kWords = kTileRows / kWordRows;
  static constexpr int kProducerWarps = kTileKeys / kWarpKeys, kThreads = 128 * (1 + kConsumers);
  static constexpr int kStages = kHeadDim <= 64 || kHeadDim > 192 ? 2 : 3;  // of a step's rows
  // Of consumers; of the second one where it owns the gradient of keys; of producers.
  static constexpr int kConsumerRegisters = kHasNarrowValues ? 208 : kSplitsGradients ? 232 : 224;
  static constexpr int kKeyConsumerRegisters = 224;
  static constexpr int kProducerRegisters = kHasNarrowValues ? 72 : kSplitsGradients ? 48 : 56;
  static_assert(has_registers({kConsumerRegisters, kKeyConsumerRegisters, kProducerRegisters}));

  // Whether gradients of scores are made from rounded probabilities, as there are no registers to keep others.
  static constexpr bool kUnpacksProbabilities = kHeadDim != 96;

  // Whether hidden probabilities are overwritten once they are packed, in 10 instructions of eight in place of 17;
  // measured.
  static constexpr bool kHidesPacked = kHeadDim > 64;

  // From which share of such steps on (MetOnceTiles::least_share) dquery of rows that one tile of keys alone meets is
  // stored; measured. Wide heads gain nothing by it.
  static constexpr int kStoredShare = kSplitsGradients ? 0 : 24;
  static constexpr bool kMayStoreQueries = kStoredShare > 0;

  // Of producers, if they have the registers: whether L2 is told that keys are read once, whether most warps look the
  // next work up before consumers are told of the end of the one before, whether words of a packed mask are read for
  // several steps at once, and of how many bands then.
  static constexpr bool kHasProducerRegisters = !kSplitsGradients || kHasNarrowValues;
  static constexpr bool kReadsKeysOnce = kHasProducerRegisters, kEndsWorksEarly = kHasProducerRegisters,
                        kReadsWordsAhead = kHeadDim <= 192;
  static constexpr int kWordBands = kHasProducerRegisters ? 2 : 1;

  // Whether producers read once, not for every box, where a step's rows are; measured.
  static constexpr bool reads_places_once(bool planned) { return kHeadDim < 128 || !planned || kHasNarrowValues; }

  // Whether consumers store their results as boxes; measured.
  static constexpr bool kStoresBoxes = (kHeadDim == 64 || kHeadDim == 128) && !kRowBiased;

  // Of consumers that own keys, all measured, as what is faster cannot be told otherwise (docs/cuda.md, "Between
  // products"):
  // how many pairs of lse a thread reads before the products that later reads would wait for, as registers allow, and
  // whether it reads what it sees by then, too;
  // how many pairs of delta it reads before the products for values, which later reads would wait for likewise;
  // whether it is found where sums of queries lie before the products are waited for;
  // when the next step is asked for;
  // whether keys are handed back before the last gradients of queries are added;
  // whether the addresses of what is stored of scores' gradients are worked out from the first of them;
  // whether it is found out before the last products are waited for, or after that, if there is a next step;
  // whether calls without large rows have code of their own.
  // `plain`: there is neither a bias nor a transform of scores, nor turns at sums.
  static constexpr int early_pairs(bool planned, bool plain) {
    return kHeadDim <= 64 ? 2 : kHeadDim <= 96 || (!planned && plain) ? 8 : 6;
  }
  static constexpr int early_deltas(bool planned, bool plain) {
    return kHeadDim == 96 ? 3 : kHeadDim == 128 && plain ? (planned ? 2 : 4) : 0;
  }
  enum class Asks { kBeforeProductsForValues, kOnceTheyAreIssued, kOnceScoreGradientsAreStored };
  static constexpr Asks asks(bool planned, bool plain) {
    if (kHeadDim <= 64) return Asks::kOnceScoreGradientsAreStored;
    return kHeadDim == 128 && !planned && plain ? Asks::kOnceTheyAreIssued : Asks::kBeforeProductsForValues;
  }
  static constexpr bool releases_keys_early(bool plain) { return kHeadDim == 128 && plain; }
  static constexpr bool reads_seen_ahead(bool planned, bool plain) {
    return kHidesPacked && planned && (kHeadDim != 128 || plain);
  }
  static constexpr bool finds_sums_early(bool plain) { return kHeadDim == 96 || !plain; }
  static constexpr bool finds_pieces_together(bool planned) { return kHeadDim > 64 && !kSplitsGradients && !planned; }
  static constexpr bool kBranchesEarly = kHeadDim == 128;
  static constexpr bool keeps_large_rows_apart(bool planned, bool plain) {
    return plain && (kHeadDim == 96 || (kHeadDim == 128 && !planned));
  }

  // Whether a step's gradients of scores are stored once the consumer has its turn: by then the other one has
  // multiplied those of two steps before, and two places suffice. Else three are needed, and a bias has no room.
  static constexpr bool kStoresScoresLate = kRowBiased;

  // Of a deterministic backward: places that steps take by turns while they wait for their turn to add gradients of
  // queries. There are more than steps from the one that was brought last to the one that is added.
  static constexpr int kTurnPlaces = kSplitsGradients || kRowBiased ? 4 : 3;

  // Shared memory, in panels.
  static constexpr int kKeyPanels = panels(kHeadDim), kValuePanels = panels(kValueDim);
  static constexpr std::size_t kKeyBytes = std::size_t{kKeyPanels} * kTileKeys * 128;
  static constexpr std::size_t kValueBytes = std::size_t{kValuePanels} * kTileKeys * 128;
  static constexpr std::size_t kQueryBytes = std::size_t{kKeyPanels} * kTileRows * 128;  // of a step
  static constexpr std::size_t kOutputGradientBytes = std::size_t{kValuePanels} * kTileRows * 128;
  static constexpr std::size_t kRowBytes = kQueryBytes + kOutputGradientBytes;
  static constexpr int kScoreStages = kSplitsGradients || kRowBiased ? 2 : 3;  // of scores' gradients
  static constexpr std::size_t kScoreBytes = std::size_t{kTileKeys} * kTileRows * 2;
  static constexpr std::size_t kProbabilityBytes = kSplitsGradients ? kScoreBytes : 0;
  static constexpr std::size_t kBiasBytes = kRowBiased ? kScoreBytes : 0;  // of a step
  static constexpr std::size_t kTilesBytes =
      kKeyBytes + kValueBytes + kStages * kRowBytes + kScoreStages * kScoreBytes + kProbabilityBytes + kBiasBytes;

  // dquery is made in parts: 64 of the rows for each consumer or, of a step that has no more, panels of columns, of
  // which the last may not be full.
  static constexpr bool kSplitsRows = kTileRows == 64 * kConsumers;
  static constexpr int kQueryColumns = kSplitsRows ? kHeadDim : 64;
};

}  // namespace flash_dmattn::internal::cuda::sm90
