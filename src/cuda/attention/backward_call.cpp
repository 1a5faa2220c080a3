#include "cuda/attention/backward_call.h"

#include <algorithm>

#include "cuda/attention/call.h"
#include "cuda/attention/gradient_passes.h"
#include "cuda/attention/row_facts.h"
#include "cuda/clear.h"

namespace flash_dmattn::internal::cuda {
namespace {

BackwardParams backward_params(const BackwardProblem& problem, const Gpu& gpu, const BackwardScratch& scratch) {
  BackwardParams params;
  fill(problem, gpu, scratch.prepared, &params);
  params.dout = problem.dout;
  params.row_facts = scratch.row_facts;
  params.row_flags = &scratch.counters->row_flags;
  params.row_stats = problem.sink.defined() ? scratch.row_stats : static_cast<const RowStats*>(problem.row_stats);
  params.row_tile = scratch.tiles.rows;
  params.dquery_sums = scratch.dquery_sums;
  params.dquery_colors = scratch.dquery_colors;
  params.turns = scratch.turns;
  params.dquery = problem.dquery;
  if (is_aligned(problem.dquery)) params.met_once = scratch.met_once;
  params.dkey = problem.dkey;
  params.dvalue = problem.dvalue;
  params.dkey_sums = scratch.key_sums.dkey;
  params.dvalue_sums = scratch.key_sums.dvalue;
  params.dbias_sums = scratch.dbias_sums;
  params.dbias = scratch.dbias;
  params.wants_dkey = problem.dkey.defined();
  params.wants_dvalue = problem.dvalue.defined();
  params.uses_sums = scratch.wants_sums;
  params.stored = scratch.key_sums.stored;
  params.works = scratch.works;
  params.works.last = scratch.order;
  params.works.taken = &scratch.counters->taken_works;
  params.tile_order = scratch.tile_order;
  params.splits = scratch.splits;
  params.chunk_limit = scratch.prepared.plan.chunk_count;
  params.colors = scratch.key_sums.colors;
  params.key_color_stride = problem.batch * problem.key_heads * problem.keys;
  params.bias_color_stride =
      static_cast<std::int64_t>(scratch.bias_sums == BiasSums::kByHead ? scratch.dbias_count : 0);
  params.aligned = params.aligned && is_aligned(problem.dout) && is_aligned(problem.dquery) &&
                   is_aligned(problem.dkey) && is_aligned(problem.dvalue);
  return params;
}

// What the kernels of a backward find: works are listed, sums cleared, facts of rows made. Kernels that need nothing of
// one another run side by side.
void launch_first_passes(const BackwardProblem& problem, const BackwardScratch& scratch, const BackwardKernels& kernels,
                         const BackwardParams& params, Launches* launches, cudaStream_t stream) {
  const KeyGradientSums& sums = scratch.key_sums;
  launches->then([&] { return launch_clear(scratch.counters, scratch.cleared_bytes, stream); });
  if (scratch.bias_sums == BiasSums::kInPlace) {
    launches->then([&] { return clear(scratch.dbias_sums, scratch.dbias_bytes, stream); });
  }
  const Visibility& visibility = scratch.prepared.visibility;
  if (scratch.bias_sums == BiasSums::kStored && (visibility.is_causal || visibility.seqlens != nullptr)) {
    const std::size_t bytes = scratch.dbias_count * size_of(problem.dbias.dtype);
    launches->then([&] { return clear(problem.dbias.data, bytes, stream); });
  }
  bool beside = false;  // the kernel before lets the next one begin
  if (sums.marks == nullptr) {
    launches->then([&] { return clear(sums.dkey, scratch.key_bytes, stream); });
    launches->then([&] { return clear(sums.dvalue, scratch.value_bytes, stream); });
  } else {
    const DevicePlan& plan = scratch.prepared.plan;
    launches->then([&] { return launch_mark_keys(problem, plan, sums, params.met_once, stream); });
    if (!scratch.adds_by_launches()) {
      launches->then([&] { return kernels.list_works(params); });
      beside = true;
    }
    launches->then([&] { return launch_clear_key_sums(problem, sums, beside, stream); });
    beside = problem.keys > 0;
  }
  launches->then([&] {
    const RowPass pass = {.row_tile = scratch.tiles.rows,
                          .facts = scratch.row_facts,
                          .flags = &scratch.counters->row_flags,
                          .query_sums = scratch.dquery_sums,
                          .query_sum_colors = scratch.dquery_colors,
                          .sum_width = bucket_of(wider_head_dim(problem)),
                          .met_once = params.met_once,
                          .plan = scratch.prepared.plan,
                          .beside = beside,
                          .natural = params.score.natural,
                          .stats = scratch.row_stats,
                          .sink_parts = scratch.sink_parts};
    return launch_row_facts(problem, pass, stream);
  });
}

// Blocks that own keys: their gradients, and in one go those of queries and bias.
void launch_key_passes(const BackwardProblem& problem, const BackwardScratch& scratch, const BackwardKernels& kernels,
                       BackwardParams params, Launches* launches) {
  // In a deterministic backward without turns some are left to launch_query_backward.
  if (scratch.deterministic && params.bias_by_row) params.dbias_sums = nullptr;
  const bool wanted = params.wants_dkey || params.wants_dvalue || params.dquery_sums != nullptr ||
                      params.dbias_sums != nullptr || scratch.bias_sums == BiasSums::kStored;
  if (problem.keys == 0 || !wanted) return;
  const auto launch = [&] { launches->then([&] { return kernels.launch(params, scratch.prepared.planned); }); };
  if (!scratch.adds_by_launches()) return launch();
  const auto list_and_launch = [&] {
    launches->then([&] { return kernels.list_works(params); });
    launch();
  };
  params.takes_ranges = false;
  for (std::int32_t first = 0; first < scratch.prepared.plan.chunk_count; first += scratch.launch_chunks) {
    params.first_chunk = first;
    params.chunk_limit = std::min(first + scratch.launch_chunks, scratch.prepared.plan.chunk_count);
    list_and_launch();
  }
  params.first_chunk = params.chunk_limit = 0;
  params.takes_ranges = true;
  list_and_launch();
}

// From sums to gradients.
void launch_results(const BackwardProblem& problem, const BackwardScratch& scratch, const BackwardKernels& kernels,
                    const BackwardParams& params, Launches* launches, cudaStream_t stream) {
  bool beside = false;  // whether a pass that lets the next one begin has just been launched
  if (scratch.dquery_sums != nullptr) {
    launches->then([&] { return kernels.launch_query_gradients(params); });
    beside = true;
  }
  const bool has_query_pass = scratch.deterministic && !scratch.takes_turns();
  if (has_query_pass && (problem.dquery.defined() || (problem.dbias.defined() && params.bias_by_row))) {
    launches->then([&] { return kernels.launch_query_backward(params, scratch.prepared.planned); });
    beside = false;
  }
  const KeyGradientSums& key_sums = scratch.key_sums;
  if ((key_sums.dkey != nullptr || key_sums.dvalue != nullptr) && problem.keys > 0) {
    launches->then([&] { return launch_key_gradients(problem, key_sums, beside, stream); });
    beside = true;
  }
  if (scratch.bias_sums == BiasSums::kByHead) {
    launches->then(
        [&] { return launch_reduced_bias_gradients(problem, scratch.dbias_sums, key_sums.colors, beside, stream); });
  } else if (scratch.bias_sums == BiasSums::kRounded) {
    launches->then([&] {
      return launch_bias_gradients(scratch.dbias_sums, bias_elements(problem.dbias), problem.dbias.dtype,
                                   problem.dbias.data, beside, stream);
    });
  }
  if (scratch.sink_parts != nullptr) {
    launches->then([&] { return launch_sink_gradients(problem, scratch.sink_parts, stream); });
  }
}

}  // namespace

Status arrange_backward(const BackwardProblem& problem, BackwardTiles tiles, std::size_t* bytes) {
  Arena arena(nullptr);
  BackwardScratch scratch;
  scratch.arrange(problem, tiles, &arena);
  *bytes = arena.used();
  return scratch.check_key_blocks(problem);
}

Status run_backward(const BackwardProblem& problem, const Gpu& gpu, const BackwardKernels& kernels, void* workspace,
                    cudaStream_t stream) {
  Launches launches;
  Arena arena(workspace);
  BackwardScratch scratch;
  scratch.arrange(problem, kernels.tiles, &arena);
  scratch.prepared.write(problem, &launches, stream);
  const BackwardParams params = backward_params(problem, gpu, scratch);
  log_call(kernels.family, kernels.variant, "backward", problem, plan_kind(scratch.prepared));
  launch_first_passes(problem, scratch, kernels, params, &launches, stream);
  launch_key_passes(problem, scratch, kernels, params, &launches);
  launch_results(problem, scratch, kernels, params, &launches, stream);
  return launches.status();
}

}  // namespace flash_dmattn::internal::cuda
