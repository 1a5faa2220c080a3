// Makes the plan of a problem on the device: which keys every chunk of query rows sees (device_plan.h). Nothing comes
// back to the host: memory is bounded by the shapes, and what depends on data is decided where the data are.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/plan/device_plan.h"
#include "cuda/plan/visibility.h"

namespace flash_dmattn::internal::cuda {

// How the keys of a list follow one another. Units visit whole tiles of them.
enum class ListOrder {
  // First those that the chunk's first unit sees, by the last unit that sees them, highest first, and by index where
  // that is equal; then the others by index. For keys that neighbouring rows see: units see long runs of them.
  kFirstUnit,
  // For keys that every row chooses for itself: chunks whose rows together see nearly all keys are lists, too, where
  // units see few of them. Keys are ordered by the set of units that see them, as sets follow one another in a Gray
  // code, and by index where that is equal: units visit whole tiles, and so also what others see of those in which one
  // set gives way to another. There are few of these if lists have parts, for fewer units each (PlanShape::part_units).
  // What a set of all units fills of pairs of tiles comes first, sets by their number, then what a set of each half of
  // the units fills of the other keys that it sees, and so on; at last the parts of so few units, in order, each with
  // what is left of all that these see. A key may so stand in several parts, but never twice in a pair of tiles: -1
  // stands between parts.
  kUnits,
};

// The sizes of a DevicePlan, known from shapes and strides alone.
struct PlanShape {
  ListOrder order = ListOrder::kFirstUnit;
  bool per_batch = false;         // batch elements differ in what they see
  std::int32_t plan_heads = 1;    // distinct plans of a batch element
  std::int64_t head_divisor = 1;  // query head h uses plan h / head_divisor
  std::int32_t chunk_count = 0;
  std::int32_t capacity = 0;  // keys of a list at most; 0 if only the causal rule and lengths hide keys: always a range
  std::int32_t tiles = 0;

  // kUnits: how many units the smallest parts of a list are for; all of them: every key stands once.
  std::int32_t part_units = kChunkUnits;
  // Lists have room for so many times their keys.
  constexpr int copies() const { return order == ListOrder::kUnits && part_units < kChunkUnits ? 2 : 1; }
};

// In the order kFirstUnit a list longer than this share of the keys from its first to its last becomes a range:
// gathering would gain too little.
constexpr int kListShareNumerator = 3, kListShareDenominator = 4;
// Longest list that any problem may have when nothing better is known (`list_limit` 0), beside a quarter of its keys.
constexpr std::int32_t kLeastCapacity = 4096;

// `list_limit`: how many keys a chunk can list at most, each counted once, if the caller knows (w + kChunkRows for
// intervals that keep the top w), else 0. A chunk that would list more becomes a range, so that the limit costs speed
// and never correctness.
PlanShape plan_shape(const Visibility& visibility, std::int64_t batch, std::int64_t heads, std::int64_t list_limit,
                     ListOrder order = ListOrder::kFirstUnit, int part_units = kChunkUnits);

// Bytes of a plan, and of the scratch memory that make_plan needs beside it.
std::size_t plan_bytes(const PlanShape& shape, std::int64_t batch);
std::size_t staging_bytes(const PlanShape& shape, std::int64_t batch);

// The plan that make_plan wrote, or is going to write, into `memory`; all pointers are null if that is null.
DevicePlan plan_at(const PlanShape& shape, std::int64_t batch, void* memory);

// Enqueues the making of the plan into `memory` (aligned to 64 bytes), one kernel, or two in the order kUnits, and
// describes it in `plan`.
// `staging` (aligned to 64 bytes) is of no use once it is made. The same visibility gives the same plan, bit by bit:
// - listed keys stand in the shape's order;
// - -1 follows up to a multiple of two tiles; tile_units of all later tiles are 0.
// Returns launch errors only; never waits.
cudaError_t make_plan(const Visibility& visibility, const PlanShape& shape, std::int64_t batch, void* memory,
                      void* staging, DevicePlan* plan, cudaStream_t stream);

// What a plan holds, summed over batch elements and query heads.
struct PlanCounts {
  std::int64_t kept_scores;      // visible (row, key) pairs
  std::int64_t computed_scores;  // scores of the tiles visited; rows past the last are not counted
  std::int64_t tiles_visited;    // of kUnitRows rows x kPlanTileKeys keys, those that the plan says some row may see
  std::int64_t tiles_partial;    // visited ones of which some score is hidden
  std::int64_t tiles_full;
  std::int64_t listed_keys;                // keys of all lists, as often as they stand there
  std::int64_t range_chunks, list_chunks;  // a chunk without keys is a list
};

// Enqueues the counting; `device_counts` lies in device memory. For reports: it looks at every visited score.
cudaError_t count_plan(const Visibility& visibility, const DevicePlan& plan, std::int64_t batch, std::int64_t heads,
                       PlanCounts* device_counts, cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
