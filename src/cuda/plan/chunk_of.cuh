// Which chunk of a plan has a row of a head, with a division that is fast on a GPU.
#pragma once

#include <cstdint>

#include "cuda/plan/device_plan.h"
#include "cuda/plan/entry_offset.cuh"
#include "cuda/plan/visibility.h"

namespace flash_dmattn::internal::cuda {

// As DevicePlan::first_chunk, plus the row's chunk.
__device__ inline std::int64_t chunk_of(const DevicePlan& plan, int batch, int head, int row) {
  const std::int64_t entry =
      std::int64_t{plan.per_batch ? batch : 0} * plan.plan_heads + entry_of_head(head, plan.head_divisor);
  return entry * plan.chunk_count + row / kChunkRows;
}

}  // namespace flash_dmattn::internal::cuda
