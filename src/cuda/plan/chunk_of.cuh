// Which chunk of a plan has a row of a head, with a division that is fast on a GPU.
#pragma once

#include <cstdint>

#include "cuda/plan/device_plan.h"
#include "cuda/plan/entry_offset.cuh"
#include "cuda/plan/visibility.h"

namespace flash_dmattn::internal::cuda {

// `plan_head`: the head of the plan that the query head uses.
__device__ inline std::int64_t chunk_of_plan_head(const DevicePlan& plan, int batch, std::uint32_t plan_head, int row) {
  return (std::int64_t{plan.per_batch ? batch : 0} * plan.plan_heads + plan_head) * plan.chunk_count + row / kChunkRows;
}
// As DevicePlan::first_chunk, plus the row's chunk.
__device__ inline std::int64_t chunk_of(const DevicePlan& plan, int batch, int head, int row) {
  return chunk_of_plan_head(plan, batch, entry_of_head(head, plan.head_divisor), row);
}

}  // namespace flash_dmattn::internal::cuda
