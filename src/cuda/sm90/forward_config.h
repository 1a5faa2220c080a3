// Tile sizes of the sm90 forward and what they cost.
#pragma once

#include <cstddef>

namespace flash_dmattn::internal::cuda::sm90 {

constexpr int kConsumerRows = 64;

// One warp group brings tiles of keys and values, the others compute: each owns kConsumerRows query rows.
template <int kHeadDimBucket, bool kPlanned>
struct ForwardConfig {
  static constexpr int kHeadDim = kHeadDimBucket;
  // Rows of a plan's block lie in one chunk, which three times 64 do not divide.
  static constexpr int kConsumers = kHeadDim <= 64 && !kPlanned ? 3 : 2;  // warp groups
  static constexpr int kTileRows = kConsumerRows * kConsumers;
  // In a plan whole tiles of that.
  static constexpr int kTileKeys = kHeadDim <= 128 ? 128 : kPlanned ? 64 : kHeadDim == 192 ? 112 : 80;
  static constexpr int kValueStages = !kPlanned ? 2 : kHeadDim == 64 ? 4 : kHeadDim == 192 ? 3 : 2;
  static constexpr int kKeyStages = kPlanned && kHeadDim <= 128 ? kValueStages + 1 : kValueStages;
  // In a plan: of what consumers know of keys. When the producer writes that of stage n, keys of stage n - 1 -
  // kKeyStages have been read, and so all that is known of the stages before n - 2 - kKeyStages; one to spare.
  static constexpr int kFactsSlots = kKeyStages + 4;
  static constexpr int kRoleWarps = kTileKeys / 32;  // in a plan: that bring keys, and as many that bring values
  static constexpr int kProducers = kPlanned && kRoleWarps == 4 ? 2 : 1;  // warp groups
  static constexpr int kThreads = 128 * (kProducers + kConsumers);
  // 65536 registers of a multiprocessor, in eights a thread. Finding keys takes some.
  static constexpr int kProducerRegisters = kPlanned          ? (kProducers == 1  ? 72
                                                                 : kHeadDim == 96 ? 64
                                                                                  : 56)
                                            : kConsumers == 3 ? 32
                                                              : 40;
  static constexpr int kValueProducerRegisters = kHeadDim == 96 ? 48 : 40;  // where they have a warp group of their own
  static constexpr int kConsumerRegisters = kPlanned          ? (kProducers == 1  ? 216
                                                                 : kHeadDim == 96 ? 200
                                                                                  : 208)
                                            : kConsumers == 3 ? 160
                                                              : 232;
  // Whether the warp groups take turns at the tensor cores, so that one multiplies while another exponentiates.
  static constexpr bool kTakesTurns = kHeadDim <= 128;

  // Shared memory: panels of 64 columns, 128 bytes a row.
  static constexpr int kPanels = (kHeadDim + 63) / 64;
  static constexpr std::size_t kQueryBytes = std::size_t{kPanels} * kTileRows * 128;
  static constexpr std::size_t kTileBytes = std::size_t{kPanels} * kTileKeys * 128;
  static constexpr std::size_t kTilesBytes = kQueryBytes + (kKeyStages + kValueStages) * kTileBytes;
};

}  // namespace flash_dmattn::internal::cuda::sm90
