// Tile sizes of the sm90 forward and what they cost.
#pragma once

#include <cstddef>

namespace flash_dmattn::internal::cuda::sm90 {

// One warp group brings tiles of keys and values, the others compute: each owns 64 query rows.
template <int kHeadDimBucket>
struct ForwardConfig {
  static constexpr int kHeadDim = kHeadDimBucket;
  static constexpr int kConsumers = kHeadDim <= 64 ? 3 : 2;  // warp groups
  static constexpr int kTileRows = 64 * kConsumers;
  static constexpr int kTileKeys = kHeadDim <= 128 ? 128 : kHeadDim == 192 ? 112 : 80;
  static constexpr int kStages = 2;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // 65536 registers of a multiprocessor, in eights a thread.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  // Whether the warp groups take turns at the tensor cores, so that one multiplies while another exponentiates.
  static constexpr bool kTakesTurns = kHeadDim <= 128;

  // Shared memory: panels of 64 columns, 128 bytes a row.
  static constexpr int kPanels = (kHeadDim + 63) / 64;
  static constexpr std::size_t kQueryBytes = std::size_t{kPanels} * kTileRows * 128;
  static constexpr std::size_t kTileBytes = std::size_t{kPanels} * kTileKeys * 128;
  static constexpr std::size_t kSharedBytes =
      kQueryBytes + 2 * kStages * kTileBytes + 1024;  // and ForwardBlock::Shared
  static_assert(kSharedBytes <= 227 * 1024);
};

}  // namespace flash_dmattn::internal::cuda::sm90
