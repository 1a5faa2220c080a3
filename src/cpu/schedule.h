// How a call is cut into units of work that run independently. Decided once per call from shapes (and,
// unless the call is to be deterministic, from the number of workers).
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace flash_dmattn::internal::cpu {

// Whether all query heads of a key head see the same keys.
bool plan_is_shared_in_group(const AttentionProblem&);

// A forward unit attends one chunk of rows of one batch element for a run of key heads.
struct ForwardSchedule {
  int chunk_rows = 0;
  std::int64_t chunks = 0;
  int pass_heads = 1;               // query heads that share a plan and packed keys
  std::int64_t unit_key_heads = 1;  // key heads a unit attends one after another, sharing the plan
  std::int64_t head_runs = 0;       // runs of unit_key_heads
  std::int64_t units = 0;

  struct Unit {
    std::int64_t batch, key_head_begin, key_head_end, row_begin;
    int rows;
  };
  // Units in the order to start them: with the causal rule the longest first.
  Unit unit(const AttentionProblem&, std::int64_t index) const;
};

ForwardSchedule make_forward_schedule(const AttentionProblem&, int concurrency);

// How the bias's gradient is gathered, by the shape of the bias.
enum class BiasGradient : std::uint8_t {
  kNone,
  kDirect,   // every score has an entry of its own: written where it is computed
  kStrip,    // rows are full, but batch, heads or keys are broadcast: summed over them in a strip of rows
  kColumns,  // broadcast over rows: summed per unit, units then summed in order
};

// A backward unit walks over every `splits`-th chunk of rows of one share group: the (batch, key head)
// pairs whose scores meet in one strip of the bias's gradient, or else a single pair. It has dK and dV
// sums of its own for each pair, which are added in order at the end.
struct BackwardSchedule {
  int chunk_rows = 0;
  std::int64_t chunks = 0;
  int pass_heads = 1;
  BiasGradient bias_gradient = BiasGradient::kNone;
  std::int64_t group_batches = 1;    // batch elements of a share group
  std::int64_t group_key_heads = 1;  // key heads of a share group
  std::int64_t head_groups = 0;      // share groups of a batch element
  std::int64_t splits = 1;
  std::int64_t units = 0;

  struct Unit {
    std::int64_t batch_begin, key_head_begin, split;
  };
  // Units are numbered by share group, then split.
  Unit unit(std::int64_t index) const;
  // Chunks of split `split` in the order to walk them; -1 past the last. Folding the chunks back and
  // forth over the splits evens out the causal triangle.
  std::int64_t chunk(std::int64_t split, std::int64_t step) const;
};

BackwardSchedule make_backward_schedule(const BackwardProblem&, int concurrency);

}  // namespace flash_dmattn::internal::cpu
