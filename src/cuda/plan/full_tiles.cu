#include "cuda/plan/full_tiles.h"

#include "cuda/plan/visibility.cuh"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr int kThreads = 256;

// A warp a tile; each lane looks at two keys.
__global__ void __launch_bounds__(kThreads)
    full_tiles_kernel(const __grid_constant__ Visibility visibility, const __grid_constant__ DevicePlan plan,
                      std::int64_t entries, std::uint16_t* tile_full) {
  const std::int64_t warp = (static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t entry = warp / plan.tiles;  // of the plan's chunks
  const auto tile = static_cast<std::int32_t>(warp % plan.tiles);
  if (entry >= entries) return;
  const ChunkKeys keys = plan.chunks[entry];
  std::uint32_t full = 0;
  if (tile * kListTile < keys.count && plan.tile_units[entry * plan.tiles + tile] != 0) {
    const auto chunk = static_cast<std::int32_t>(entry % plan.chunk_count);
    const std::int64_t place = entry / plan.chunk_count;
    const auto head = static_cast<std::int32_t>(place % plan.plan_heads * plan.head_divisor);
    const auto batch = static_cast<std::int32_t>(plan.per_batch ? place / plan.plan_heads : 0);
    const std::int32_t existing = key_count(visibility, batch), first_row = chunk * kChunkRows;
    full = ~0u;
#pragma unroll
    for (int half = 0; half < kListTile / 32; ++half) {
      const std::int32_t position = tile * kListTile + half * 32 + lane;
      std::int32_t key = -1;
      if (position < keys.count) {
        key = keys.first >= 0 ? keys.first + position : plan.keys[entry * plan.capacity + position];
      }
      const RowRange range = visible_rows(visibility, batch, head, existing, key);
#pragma unroll 4
      for (int unit = 0; unit < kChunkUnits; ++unit) {
        const std::int32_t unit_row = first_row + unit * kUnitRows;
        bool sees_all = true;
#pragma unroll
        for (int row = unit_row; row < unit_row + kUnitRows; row += kWordRows) {
          // Rows past the last see nothing and count as seeing all.
          const std::uint32_t rows = bit_range(0, visibility.rows - row);
          sees_all = sees_all && (visible_word(visibility, range, batch, head, key, row) & rows) == rows;
        }
        if (!sees_all) full &= ~(1u << unit);
      }
    }
  }
  full = __reduce_and_sync(~0u, full);
  if (lane == 0) tile_full[warp] = static_cast<std::uint16_t>(full);
}

}  // namespace

std::size_t full_tiles_bytes(std::int64_t plan_count, std::int32_t chunk_count, std::int32_t tiles) {
  return static_cast<std::size_t>(plan_count * chunk_count * tiles) * sizeof(std::uint16_t);
}

cudaError_t find_full_tiles(const Visibility& visibility, std::int64_t plan_count, void* memory, DevicePlan* plan,
                            cudaStream_t stream) {
  auto* tile_full = static_cast<std::uint16_t*>(memory);
  const std::int64_t entries = plan_count * plan->chunk_count;
  const std::int64_t blocks = (entries * plan->tiles * 32 + kThreads - 1) / kThreads;
  if (blocks > 0) {
    full_tiles_kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(visibility, *plan, entries, tile_full);
  }
  plan->tile_full = tile_full;
  return cudaGetLastError();
}

}  // namespace flash_dmattn::internal::cuda
