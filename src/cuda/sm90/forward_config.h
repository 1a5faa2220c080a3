// Tile sizes of the sm90 forward and what they cost.
#pragma once

#include <cstddef>

#include "cuda/sm90/warps.h"

namespace flash_dmattn::internal::cuda::sm90 {

constexpr int kConsumerRows = 64;

// What becomes of products before the softmax.
enum class Scoring {
  kNone,       // nothing: the softmax's multiplier has the scale
  kScaled,     // the scale and, in a plan, a bias that is the same for every row
  kKeyBiased,  // the scale and a bias that is the same for every row; not in a plan, whose facts have it
  kRowBiased,  // the scale and a bias that differs by row, which comes tile by tile, as keys do; not in a plan
  kAny,        // a softcap, and any bias: one that differs by row is read entry by entry
};

// Wider heads leave no registers for Scoring::kAny.
constexpr int kMostAnyHeadDim = 128;

// One or two warp groups bring tiles of keys and values, the others compute: each owns kConsumerRows query rows.
// Heads of keys and of values differ in some models; both are rounded up to a bucket.
template <int kHeadDimBucket, int kValueDimBucket, bool kPlanned, Scoring kScoring>
struct ForwardConfig {
  static constexpr int kHeadDim = kHeadDimBucket, kValueDim = kValueDimBucket;
  // Whether a bias comes tile by tile in stages of its own: boxes of it, or what is the same for every row.
  static constexpr bool kRowBiased = kScoring == Scoring::kRowBiased;
  static constexpr bool kStagesKeyBias = !kPlanned && (kScoring == Scoring::kKeyBiased || kScoring == Scoring::kAny);
  // Three hide each other's waits better than two with larger tiles. Rows of a plan's block lie in one chunk, which
  // three times 64 do not divide; above 128 columns, and for scores of any kind, there are no registers for three.
  static constexpr int kConsumers = kHeadDim <= 128 && !kPlanned && kScoring != Scoring::kAny ? 3 : 2;  // warp groups
  static constexpr int kTileRows = kConsumerRows * kConsumers;
  // In a plan whole tiles of that. Else as many as registers allow: a thread has kTileKeys / 2 scores, half as many
  // registers of probabilities, and kValueDim / 2 sums; and that a bias by row, which comes in panels of 64, leaves
  // shared memory for.
  static constexpr int tile_keys() {
    if (kScoring == Scoring::kAny) return 64;
    if (kPlanned) return kHeadDim <= 128 ? 128 : 64;
    if (kRowBiased) return 64;
    if (kHeadDim == 64) return 128;
    constexpr bool kFew = kScoring == Scoring::kKeyBiased;
    if (kHeadDim == 96) return kFew ? 96 : 112;
    if (kHeadDim == 192) return kValueDim <= 128 ? 128 : 112;
    return kHeadDim == 256 && kFew ? 64 : 80;
  }
  static constexpr int kTileKeys = tile_keys();
  static constexpr int kValueStages = kPlanned                              ? (kHeadDim == 64    ? 4
                                                                               : kHeadDim == 192 ? 3
                                                                                                 : 2)
                                      : kTileKeys < 128 && kValueDim <= 128 ? 3
                                                                            : 2;
  static constexpr int kBiasStages = kRowBiased || kStagesKeyBias ? kValueStages : 0;
  // In a plan values wait for what is known of their keys: a stage of keys more, where there is room.
  static constexpr int kKeyStages = kPlanned && kValueDim <= 128 ? kValueStages + 1 : kValueStages;
  // In a plan: of what consumers know of keys. When the producer writes that of stage n, stage n - 1 - kKeyStages has
  // been handed back, and with it all that is known of the stages before that one.
  static constexpr int kFactsSlots = kKeyStages + 2;
  static constexpr int kRoleWarps = kTileKeys / kWarpKeys;  // in a plan: that bring keys, and as many that bring values
  static constexpr int kProducers = kPlanned && kRoleWarps == 4 ? 2 : 1;  // warp groups
  static constexpr int kThreads = 128 * (kProducers + kConsumers);
  // 65536 registers of a multiprocessor, in eights a thread. Finding keys takes some; producers of values have a warp
  // group of their own where there are two.
  static constexpr int kConsumerRegisters = kConsumers == 3  ? 160
                                            : !kPlanned      ? 232
                                            : kHeadDim > 128 ? 216
                                            : kHeadDim == 64 ? 192
                                                             : 200;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : !kPlanned ? 40 : kHeadDim == 64 ? 80 : 72;
  static constexpr int kValueProducerRegisters = kHeadDim == 64 ? 48 : 40;
  static_assert(kConsumers == 3
                    ? has_registers({kConsumerRegisters, kConsumerRegisters, kConsumerRegisters, kProducerRegisters})
                : kProducers == 2 ? has_registers({kConsumerRegisters, kConsumerRegisters, kProducerRegisters,
                                                   kValueProducerRegisters})
                                  : has_registers({kConsumerRegisters, kConsumerRegisters, kProducerRegisters}));
  // Whether the warp groups take turns at the tensor cores, so that one multiplies while another exponentiates.
  static constexpr bool kTakesTurns = kHeadDim <= 128;
  // How many products of 16 keys with their values a consumer begins when it has its calm scores, not before it waits
  // for them: it is held up at each until the tensor cores come to it, and could exponentiate meanwhile. Measured: with
  // a scale or bias, for which the last product would have to wait as well, it costs more than it gains.
  static constexpr int kLateProducts = kPlanned && kTakesTurns && kScoring == Scoring::kNone ? 1 : 0;
  // Whether the first scores of a work are computed while the one before ends. Takes registers.
  static constexpr bool kChainsWorks = kPlanned && kHeadDim <= 192 && kScoring != Scoring::kAny;
  // Whether a consumer leaves out tiles that only others' rows see: past the diagonal, and where it has no rows. Takes
  // a register.
  static constexpr bool kSkipsTiles = !kPlanned && kScoring != Scoring::kAny;
  // Whether rows that are calm (softmax.cuh) have a loop of their own. The largest heads have no registers left for it,
  // and wait for the tensor cores anyway; one other kernel has none, either.
  static constexpr bool kHasCalmLoop =
      kHeadDim <= 192 && kScoring != Scoring::kAny && !(kHeadDim == 128 && kScoring == Scoring::kKeyBiased);
  // Of a calm row: how many exponents are made at a time (exponentiate_calm_row). Measured.
  static constexpr int kGroupedScores = kPlanned ? 8 : 16;

  // Shared memory, in panels.
  static constexpr int kKeyPanels = panels(kHeadDim), kValuePanels = panels(kValueDim);
  static constexpr std::size_t kQueryBytes = std::size_t{kKeyPanels} * kTileRows * 128;
  static constexpr std::size_t kKeyBytes = std::size_t{kKeyPanels} * kTileKeys * 128;
  static constexpr std::size_t kValueBytes = std::size_t{kValuePanels} * kTileKeys * 128;
  static constexpr int kBiasPanels = kTileKeys / 64;
  static constexpr std::size_t kBiasBytes =
      kRowBiased ? std::size_t{kBiasPanels} * kTileRows * 128 : kTileKeys * sizeof(float);
  static constexpr std::size_t kTilesBytes =
      kQueryBytes + kKeyStages * kKeyBytes + kValueStages * kValueBytes + kBiasStages * kBiasBytes;
};

}  // namespace flash_dmattn::internal::cuda::sm90
