#include "cuda/backend.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>

#include "api/log.h"
#include "cuda/decode/decode.h"
#include "cuda/device_kernels.h"
#include "cuda/params.h"
#include "cuda/portable/buckets.h"
#include "cuda/portable/launch.h"
#include "cuda/prepared_visibility.h"
#include "cuda/score_rule.h"
#include "cuda/selection/device_selection.h"
#include "plan/arena.h"

namespace flash_dmattn::internal::cuda {
namespace {

int processor_count() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  return cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess ? count : 1;
}

bool is_aligned(const TokenView& tokens) {
  return reinterpret_cast<std::uintptr_t>(tokens.data) % 16 == 0 && tokens.batch_stride % 8 == 0 &&
         tokens.token_stride % 8 == 0 && tokens.head_stride % 8 == 0 && std::abs(tokens.token_stride) < 1 << 30;
}

void fill(const AttentionProblem& problem, const PreparedVisibility& prepared, AttentionParams* params) {
  params->query = problem.query;
  params->key = problem.key;
  params->value = problem.value;
  params->bias = problem.bias;
  params->mask = problem.mask;
  params->bias_by_row = problem.bias.defined() && problem.bias.rows > 1;
  params->batch = static_cast<std::int32_t>(problem.batch);
  params->rows = static_cast<std::int32_t>(problem.rows);
  params->keys = static_cast<std::int32_t>(problem.keys);
  params->heads = static_cast<std::int32_t>(problem.heads);
  params->key_heads = static_cast<std::int32_t>(problem.key_heads);
  params->head_dim = static_cast<std::int32_t>(problem.head_dim);
  params->group = static_cast<std::int32_t>(problem.group());
  params->score = score_rule_of(problem.scale, problem.softcap, problem.bias.defined());
  params->aligned =
      problem.head_dim % 8 == 0 && is_aligned(problem.query) && is_aligned(problem.key) && is_aligned(problem.value);
  params->shared_limit = shared_limit();
  params->visibility = prepared.visibility;
  params->plan = prepared.plan;
  params->processors = processor_count();
}

// Calls `launch` with an element and a bucket as types.
template <typename Launch>
cudaError_t by_type(const AttentionProblem& problem, Launch launch) {
  const auto by_bucket = [&](auto element) {
    using Element = decltype(element);
    return with_bucket(problem.head_dim,
                       [&]<int kHeadDim>() { return launch.template operator()<Element, kHeadDim>(); });
  };
  return problem.dtype == DType::kBFloat16 ? by_bucket(__nv_bfloat16()) : by_bucket(__half());
}

const char* plan_kind(const PreparedVisibility& prepared) {
  if (prepared.given) return "by a plan made before, in chunks of 1024 rows";
  return prepared.planned ? "planned on the device in chunks of 1024 rows" : "dense";
}

void log_call(const char* direction, const AttentionProblem& problem, const char* kind) {
  if (!logging()) return;
  const char* tiles = is_narrow(shared_limit()) ? ", narrow tiles" : "";
  std::fprintf(stderr, "flash_dmattn: cuda/portable%s %s: %s\n", tiles, describe_call(direction, problem).c_str(),
               kind);
}

std::int64_t bias_elements(const BroadcastView& bias) { return bias.batches * bias.heads * bias.rows * bias.keys; }

// Of BlockOrder. Only a plan tells how long a block takes.
std::int32_t* take_order(bool planned, Arena* arena) {
  return planned ? arena->take<std::int32_t>(kMostOrderedBlocks) : nullptr;
}

// Sums that many blocks add to begin with a cache line: else every addition of a warp touches one line more (2 %
// slower).
constexpr std::size_t kLineBytes = 128;

// Scratch memory of the backward beside the plan, and how its work is cut.
struct BackwardScratch {
  RowFacts* row_facts = nullptr;
  std::int32_t* has_large_row = nullptr;  // as in BackwardParams; it and dquery_sums are cleared_bytes
  std::int64_t padded_rows = 0;
  float *dquery_sums = nullptr, *dkey_sums = nullptr, *dvalue_sums = nullptr, *dbias_sums = nullptr;
  std::uint8_t* stored = nullptr;  // as in BackwardParams
  std::int32_t* order = nullptr;   // as in BlockOrder
  std::size_t cleared_bytes = 0, key_count = 0, key_bytes = 0, dbias_count = 0, dbias_bytes = 0;
  std::int32_t splits = 1, launch_chunks = 0, colors = 1;
  bool wants_sums = false;
  bool deterministic = false;
  BroadcastView dbias;         // of dbias_sums
  bool dbias_by_head = false;  // dbias_sums has an entry for every query head and key: launch_shared_bias_gradients

  void take(const BackwardProblem& problem, const PreparedVisibility& prepared, Arena* arena) {
    const BackwardTiles tiles = backward_tiles(static_cast<int>(problem.head_dim), shared_limit());
    const auto bucket = static_cast<std::size_t>(bucket_of(static_cast<int>(problem.head_dim)));
    deterministic = problem.deterministic;
    padded_rows = (problem.rows + tiles.rows - 1) / tiles.rows * tiles.rows;
    const auto row_count = static_cast<std::size_t>(problem.batch * problem.heads * padded_rows);
    row_facts = arena->take<RowFacts>(row_count);
    // A line for the flag and the sums after it, to be cleared in one go.
    constexpr std::size_t kLineFloats = kLineBytes / sizeof(float);
    const bool wants_dquery_sums = problem.dquery.defined() && !deterministic;
    const std::size_t cleared = kLineFloats + (wants_dquery_sums ? row_count * bucket : 0);
    cleared_bytes = cleared * sizeof(float);
    if (auto* memory = arena->take_aligned<float>(cleared, kLineBytes); memory != nullptr) {
      has_large_row = reinterpret_cast<std::int32_t*>(memory);
      if (wants_dquery_sums) dquery_sums = memory + kLineFloats;
    }
    cut(problem, prepared, tiles, arena);
    key_count = static_cast<std::size_t>(problem.batch * problem.keys * problem.key_heads) * bucket;
    key_bytes = key_count * sizeof(float) * static_cast<std::size_t>(colors);
    const auto take_sums = [&] { return arena->take_aligned<float>(key_bytes / sizeof(float), kLineBytes); };
    if (wants_sums && problem.dkey.defined()) dkey_sums = take_sums();
    if (wants_sums && problem.dvalue.defined()) dvalue_sums = take_sums();
    if (prepared.planned && splits == 1) {
      stored = arena->take<std::uint8_t>(static_cast<std::size_t>(problem.batch * problem.key_heads));
    }
    if (problem.dbias.defined()) take_bias(problem, arena);
  }

  void cut(const BackwardProblem& problem, const PreparedVisibility& prepared, BackwardTiles tiles, Arena* arena) {
    const std::int64_t group = problem.group();
    const std::int64_t key_blocks = (problem.keys + tiles.keys - 1) / tiles.keys * problem.batch * problem.key_heads;
    // Heads that see different keys have lists of their own; and a few tiles of keys alone leave most of a GPU idle,
    // the more so where they see different numbers of rows.
    const std::int64_t few_blocks = prepared.planned ? 256 : 128;
    // Ordering takes 5 to 10 us, a tenth or more of all the rest where a bool mask shows a few keys a row.
    const bool orders = prepared.visibility.begin.defined() || key_blocks >= few_blocks;
    order = take_order(prepared.planned && orders, arena);
    const bool own_lists = prepared.planned && prepared.plan.head_divisor < group;
    const bool few = key_blocks < few_blocks && !deterministic;
    splits = own_lists || few ? static_cast<std::int32_t>(group) : 1;
    wants_sums = prepared.planned || splits > 1;
    launch_chunks = prepared.plan.chunk_count;
    if (!deterministic || !prepared.planned) return;
    // As few chunks a launch as fill a large GPU a few times over; the same on every GPU, so that results are, too.
    constexpr std::int64_t kManyBlocks = 1024;
    const std::int64_t chunk_blocks =
        std::max<std::int64_t>(1, prepared.plan.capacity / tiles.keys * problem.batch * problem.key_heads * splits);
    launch_chunks = static_cast<std::int32_t>(
        std::clamp<std::int64_t>((kManyBlocks + chunk_blocks - 1) / chunk_blocks, 1, prepared.plan.chunk_count));
    colors = launch_chunks * splits;
  }

  void take_bias(const BackwardProblem& problem, Arena* arena) {
    dbias = problem.dbias;
    dbias_count = static_cast<std::size_t>(bias_elements(problem.dbias));
    // A bias gradient with rows has one owner for each of them then; one without needs its parts kept apart.
    dbias_by_head = deterministic && problem.dbias.rows == 1;
    if (dbias_by_head) {
      dbias.batches = problem.batch, dbias.heads = problem.heads, dbias.keys = problem.keys;
      dbias.batch_stride = problem.heads * problem.keys, dbias.head_stride = problem.keys, dbias.key_stride = 1;
      dbias.head_divisor = 1;
      dbias_count = static_cast<std::size_t>(problem.batch * problem.heads * problem.keys);
    }
    dbias_bytes = dbias_count * sizeof(float) * static_cast<std::size_t>(dbias_by_head ? colors : 1);
    const bool in_place = problem.dbias.dtype == DType::kFloat32 && !dbias_by_head;
    dbias_sums = in_place ? static_cast<float*>(problem.dbias.data) : arena->take<float>(dbias_bytes / sizeof(float));
  }
};

// That no launch has more blocks of keys than a grid may.
Status check_key_blocks(const BackwardProblem& problem, const PreparedVisibility& prepared,
                        const BackwardScratch& scratch) {
  const std::int64_t tile_keys = backward_tiles(static_cast<int>(problem.head_dim), shared_limit()).keys;
  const std::int64_t listed = prepared.plan.capacity / tile_keys * std::int64_t{scratch.launch_chunks};
  const std::int64_t tiles = (problem.keys + tile_keys - 1) / tile_keys + listed;
  if (tiles * problem.batch * problem.key_heads * scratch.splits <= std::numeric_limits<std::int32_t>::max()) return {};
  return Status::invalid("key", "must have fewer than 2^31 tiles of keys in a backward on CUDA, listed ones included",
                         "B " + std::to_string(problem.batch) + ", Sk " + std::to_string(problem.keys) + ", Hkv " +
                             std::to_string(problem.key_heads));
}

BackwardParams backward_params(const BackwardProblem& problem, const PreparedVisibility& prepared,
                               const BackwardScratch& scratch) {
  BackwardParams params;
  fill(problem, prepared, &params);
  params.dout = problem.dout;
  params.row_facts = scratch.row_facts;
  params.has_large_row = scratch.has_large_row;
  params.row_stats = static_cast<const RowStats*>(problem.row_stats);
  params.row_tile = backward_tiles(params.head_dim, params.shared_limit).rows;
  params.dquery_sums = scratch.dquery_sums;
  params.dquery = problem.dquery;
  params.dkey = problem.dkey;
  params.dvalue = problem.dvalue;
  params.dkey_sums = scratch.dkey_sums;
  params.dvalue_sums = scratch.dvalue_sums;
  params.dbias_sums = scratch.dbias_sums;
  params.dbias = scratch.dbias;
  params.wants_dkey = problem.dkey.defined();
  params.wants_dvalue = problem.dvalue.defined();
  params.uses_sums = scratch.wants_sums;
  params.stored = scratch.stored;
  params.order.blocks = scratch.order;
  params.splits = scratch.splits;
  params.chunk_limit = prepared.plan.chunk_count;
  params.colors = scratch.colors;
  params.key_color_stride = static_cast<std::int64_t>(scratch.key_count);
  params.bias_color_stride = static_cast<std::int64_t>(scratch.dbias_by_head ? scratch.dbias_count : 0);
  params.aligned = params.aligned && is_aligned(problem.dout) &&
                   (!problem.dquery.defined() || is_aligned(problem.dquery)) &&
                   (!problem.dkey.defined() || is_aligned(problem.dkey)) &&
                   (!problem.dvalue.defined() || is_aligned(problem.dvalue));
  return params;
}

cudaError_t clear(void* sums, std::size_t bytes, cudaStream_t stream) {
  return sums == nullptr || bytes == 0 ? cudaSuccess : cudaMemsetAsync(sums, 0, bytes, stream);
}

cudaError_t clear_key_sums(const BackwardProblem& problem, const PreparedVisibility& prepared,
                           const BackwardScratch& scratch, cudaStream_t stream) {
  if (scratch.stored != nullptr) {
    return launch_clear_key_sums(problem, prepared.plan, scratch.colors, scratch.dkey_sums, scratch.dvalue_sums,
                                 scratch.stored, stream);
  }
  const cudaError_t error = clear(scratch.dkey_sums, scratch.key_bytes, stream);
  return error != cudaSuccess ? error : clear(scratch.dvalue_sums, scratch.key_bytes, stream);
}

// No query row: every gradient that is asked for is zero.
Status clear_gradients(const BackwardProblem& problem, cudaStream_t stream) {
  constexpr std::size_t kElementBytes = 2;
  const auto key_elements =
      static_cast<std::size_t>(problem.batch * problem.keys * problem.key_heads * problem.head_dim);
  const std::size_t bias_bytes = problem.dbias.dtype == DType::kFloat32 ? sizeof(float) : kElementBytes;
  const auto dbias_elements = static_cast<std::size_t>(problem.dbias.defined() ? bias_elements(problem.dbias) : 0);
  return Launches()
      .then([&] { return clear(problem.dkey.data, key_elements * kElementBytes, stream); })
      .then([&] { return clear(problem.dvalue.data, key_elements * kElementBytes, stream); })
      .then([&] { return clear(problem.dbias.data, dbias_elements * bias_bytes, stream); })
      .status();
}

// Blocks that own keys: their gradients, and in one go those of queries and bias.
void launch_key_passes(const BackwardProblem& problem, const PreparedVisibility& prepared,
                       const BackwardScratch& scratch, BackwardParams params, Launches* launches, cudaStream_t stream) {
  // In a deterministic backward some are left to launch_query_backward.
  if (scratch.deterministic && params.bias_by_row) params.dbias_sums = nullptr;
  const bool wanted =
      params.wants_dkey || params.wants_dvalue || params.dquery_sums != nullptr || params.dbias_sums != nullptr;
  if (problem.keys == 0 || !wanted) return;
  const auto launch = [&] {
    launches->then([&] {
      return by_type(problem, [&]<typename Element, int kHeadDim>() {
        return launch_backward<Element, kHeadDim>(params, prepared.planned, stream);
      });
    });
  };
  if (scratch.colors == 1) return launch();
  params.takes_ranges = false;
  for (std::int32_t first = 0; first < prepared.plan.chunk_count; first += scratch.launch_chunks) {
    params.first_chunk = first;
    params.chunk_limit = std::min(first + scratch.launch_chunks, prepared.plan.chunk_count);
    launch();
  }
  params.first_chunk = params.chunk_limit = 0;
  params.takes_ranges = true;
  launch();
}

// From sums to gradients.
void launch_results(const BackwardProblem& problem, const PreparedVisibility& prepared, const BackwardScratch& scratch,
                    const BackwardParams& params, Launches* launches, cudaStream_t stream) {
  if (scratch.dquery_sums != nullptr) {
    launches->then([&] { return launch_query_gradients(problem, params.shared_limit, scratch.dquery_sums, stream); });
  }
  if (scratch.deterministic && (problem.dquery.defined() || (problem.dbias.defined() && params.bias_by_row))) {
    launches->then([&] {
      return by_type(problem, [&]<typename Element, int kHeadDim>() {
        return launch_query_backward<Element, kHeadDim>(params, prepared.planned, stream);
      });
    });
  }
  launches->then([&] {
    return launch_key_gradients(problem, scratch.colors, scratch.dkey_sums, scratch.dvalue_sums, scratch.stored,
                                stream);
  });
  if (scratch.dbias_by_head) {
    launches->then([&] { return launch_shared_bias_gradients(problem, scratch.dbias_sums, scratch.colors, stream); });
  } else if (problem.dbias.defined() && scratch.dbias_sums != problem.dbias.data) {
    launches->then([&] {
      return launch_bias_gradients(scratch.dbias_sums, bias_elements(problem.dbias), problem.dbias.dtype,
                                   problem.dbias.data, stream);
    });
  }
}

}  // namespace

Status attention_plan_bytes(const AttentionProblem& problem, std::size_t* bytes) {
  *bytes = 0;
  if (!is_planned(problem)) return {};
  if (Status status = check_blocks(problem); !status.ok()) return status;
  Arena arena(nullptr);
  PreparedVisibility().place(problem, &arena);
  *bytes = arena.used();
  return {};
}

Status attention_plan_workspace(const AttentionProblem& problem, std::size_t* bytes) {
  *bytes = 0;
  if (!is_planned(problem)) return {};
  if (Status status = check_blocks(problem); !status.ok()) return status;
  Arena arena(nullptr);
  PreparedVisibility prepared;
  prepared.place(problem, &arena);
  *bytes = prepared.staging_size(problem);
  return {};
}

Status make_attention_plan(const AttentionProblem& problem, void* plan, void* workspace, void* stream) {
  if (Status status = check_current_device(); !status.ok()) return status;
  Launches launches;
  Arena arena(plan);
  PreparedVisibility prepared;
  prepared.place(problem, &arena);
  prepared.write(problem, workspace, &launches, static_cast<cudaStream_t>(stream));
  return launches.status();
}

Status forward_workspace(const AttentionProblem& problem, std::size_t* bytes) {
  if (Status status = check_problem(problem); !status.ok()) return status;
  if (decode_applies(problem)) {
    *bytes = decode_workspace(problem, processor_count());
    return {};
  }
  Arena arena(nullptr);
  PreparedVisibility prepared;
  prepared.prepare(problem, &arena, false, nullptr, nullptr);
  take_order(prepared.planned, &arena);
  *bytes = arena.used();
  return {};
}

Status forward(const ForwardProblem& problem, void* workspace, void* stream_handle) {
  auto* stream = static_cast<cudaStream_t>(stream_handle);
  Launches launches;
  PreparedVisibility prepared;
  const bool decodes = decode_applies(problem);
  Arena arena(workspace);
  if (decodes) {
    prepared.visibility = visibility_of(problem);
  } else {
    prepared.prepare(problem, &arena, true, &launches, stream);
  }
  ForwardParams params;
  fill(problem, prepared, &params);
  params.out = problem.out;
  params.lse = static_cast<float*>(problem.lse);
  params.row_stats = static_cast<RowStats*>(problem.row_stats);
  params.aligned = params.aligned && is_aligned(problem.out);
  if (decodes) {
    log_call("forward", problem, "few rows: keys split among blocks");
    return status_of(launch_decode(params, problem.dtype, params.processors, workspace, stream));
  }
  log_call("forward", problem, plan_kind(prepared));
  params.order.blocks = take_order(prepared.planned, &arena);
  launches.then([&] {
    return by_type(problem, [&]<typename Element, int kHeadDim>() {
      return launch_forward<Element, kHeadDim>(params, prepared.planned, stream);
    });
  });
  return launches.status();
}

Status backward_workspace(const BackwardProblem& problem, std::size_t* bytes) {
  if (Status status = check_problem(problem); !status.ok() || problem.empty()) return status;
  Arena arena(nullptr);
  PreparedVisibility prepared;
  prepared.prepare(problem, &arena, false, nullptr, nullptr);
  BackwardScratch scratch;
  scratch.take(problem, prepared, &arena);
  *bytes = arena.used();
  return check_key_blocks(problem, prepared, scratch);
}

Status backward(const BackwardProblem& problem, void* workspace, void* stream_handle) {
  auto* stream = static_cast<cudaStream_t>(stream_handle);
  if (problem.empty()) return clear_gradients(problem, stream);
  Launches launches;
  Arena arena(workspace);
  PreparedVisibility prepared;
  prepared.prepare(problem, &arena, true, &launches, stream);
  BackwardScratch scratch;
  scratch.take(problem, prepared, &arena);
  const BackwardParams params = backward_params(problem, prepared, scratch);
  log_call("backward", problem, plan_kind(prepared));
  launches.then([&] { return clear(scratch.has_large_row, scratch.cleared_bytes, stream); })
      .then([&] {
        return launch_row_facts(problem, scratch.padded_rows, scratch.row_facts, scratch.has_large_row, stream);
      })
      .then([&] { return clear(scratch.dbias_sums, scratch.dbias_bytes, stream); })
      .then([&] { return clear_key_sums(problem, prepared, scratch, stream); });
  launch_key_passes(problem, prepared, scratch, params, &launches, stream);
  launch_results(problem, prepared, scratch, params, &launches, stream);
  return launches.status();
}

Status selection_workspace(const SelectionProblem& problem, std::size_t* bytes) {
  *bytes = selection_workspace(problem);
  return check_current_device();
}

Status select_on_device(const SelectionProblem& problem, void* workspace, void* stream) {
  return status_of(select_keys(problem, workspace, static_cast<cudaStream_t>(stream)));
}

}  // namespace flash_dmattn::internal::cuda
