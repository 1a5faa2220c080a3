// Which tiles of a plan need no look at single scores: units of rows that see all of a tile's keys.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/plan/device_plan.h"
#include "cuda/plan/visibility.h"

namespace flash_dmattn::internal::cuda {

// Bytes of memory that find_full_tiles fills, for `plan_count` plans (batch elements times heads) of these sizes.
std::size_t full_tiles_bytes(std::int64_t plan_count, std::int32_t chunk_count, std::int32_t tiles);

// Enqueues one kernel and sets plan->tile_full. Reads each listed key's interval once, and what a packed mask has for
// it.
cudaError_t find_full_tiles(const Visibility& visibility, std::int64_t plan_count, void* memory, DevicePlan* plan,
                            cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
