// The first pass of every backward: what its kernels have to know of rows (RowFacts), and what sinks add to that.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/plan/device_plan.h"

namespace flash_dmattn::internal::cuda {

// What the pass makes.
struct RowPass {
  std::int32_t row_tile = 0;  // facts are those of tiles of so many rows
  RowFacts* facts = nullptr;
  RowFlags* flags = nullptr;  // were 0
  // Of the same tiles, sums of sum_width columns, whichever way they lie, that the pass clears; null: none.
  float* query_sums = nullptr;
  std::int32_t query_sum_colors = 1;  // so many times as many
  std::int32_t sum_width = 0;
  MetOnceTiles met_once;  // found before: such tiles have no sums, if they are stored
  DevicePlan plan;        // if there are any
  bool beside = false;    // the kernel before it belongs to the same call, and the pass needs nothing of it
  float natural = 1;      // ScoreRule::natural, in which the problem's row_stats are
  // With a sink only, else null.
  RowStats* stats = nullptr;    // (B, H, Sq): the problem's, with the sink in the sum; null: it has none
  float* sink_parts = nullptr;  // (H, B, Sq): what each row adds to its sink's gradient; null: that is not wanted
};

// Both return the launch's error.
cudaError_t launch_row_facts(const BackwardProblem& problem, const RowPass& pass, cudaStream_t stream);
// problem.dsink from sink_parts, each added up in one order.
cudaError_t launch_sink_gradients(const BackwardProblem& problem, const float* sink_parts, cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
