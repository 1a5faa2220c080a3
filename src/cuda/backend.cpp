#include "cuda/backend.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "cuda/params.h"
#include "cuda/plan/make_plan.h"
#include "cuda/plan/pack_mask.h"
#include "cuda/portable/launch.h"
#include "cuda/selection/select_keys.h"
#include "plan/arena.h"

namespace flash_dmattn::internal::cuda {
namespace {

constexpr double kLog2E = 1.4426950408889634;

Status status_of(cudaError_t error) {
  return error == cudaSuccess ? Status() : Status::failed("CUDA", cudaGetErrorString(error));
}

// Runs launches one after another until one fails.
class Launches {
 public:
  template <typename Launch>
  Launches& then(Launch launch) {
    if (error_ == cudaSuccess) error_ = launch();
    return *this;
  }
  Status status() const { return status_of(error_); }
  cudaError_t error() const { return error_; }

 private:
  cudaError_t error_ = cudaSuccess;
};

Status check_problem(const AttentionProblem& problem) {
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) {
    return Status::invalid("query", "must be float16 or bfloat16 on CUDA",
                           std::string("query ") + name_of(problem.dtype));
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max() - 2048;
  if (problem.rows > kMost || problem.keys > kMost) {
    return Status::invalid("query", "and key must have fewer than 2^31 - 2048 tokens on CUDA",
                           std::to_string(problem.rows) + " and " + std::to_string(problem.keys));
  }
  return {};
}

// Whether a plan is needed: the causal rule and lengths alone are arithmetic.
bool is_planned(const AttentionProblem& problem) { return problem.mask.defined() || problem.interval_begin.defined(); }

// A mask with an entry of its own for every row is packed; others are read as they are, once a key.
bool needs_packing(const AttentionProblem& problem) {
  return problem.mask.defined() && without_copies(problem.mask).rows > 1;
}

Visibility visibility_of(const AttentionProblem& problem) {
  Visibility visibility;
  visibility.rows = static_cast<std::int32_t>(problem.rows);
  visibility.keys = static_cast<std::int32_t>(problem.keys);
  visibility.is_causal = problem.is_causal;
  visibility.seqlens = problem.seqlens;
  visibility.seqlens_stride = problem.seqlens_stride;
  visibility.begin = problem.interval_begin;
  visibility.end = problem.interval_end;
  if (problem.mask.defined() && !needs_packing(problem)) visibility.key_mask = without_copies(problem.mask);
  return visibility;
}

// What plan_shape looks at in a packed mask, before there is one.
PackedMask outline_of_packed(const BroadcastView& mask, std::int64_t rows, std::int64_t keys) {
  static const std::uint32_t kNoWords = 0;
  const BroadcastView distinct = without_copies(mask);
  PackedMask packed;
  packed.words = &kNoWords;
  packed.head_stride = distinct.heads > 1 ? rows * keys : 0;
  packed.batch_stride = distinct.batches > 1 ? rows * keys : 0;
  packed.head_divisor = distinct.head_divisor;
  return packed;
}

// Visibility and plan in scratch memory, which is measured by the same code when the arena has no block.
struct PreparedVisibility {
  Visibility visibility;
  DevicePlan plan;
  bool planned = false;

  void prepare(const AttentionProblem& problem, Arena* arena, bool launch, Launches* launches, cudaStream_t stream) {
    visibility = visibility_of(problem);
    planned = is_planned(problem);
    if (!planned) return;
    if (needs_packing(problem)) {
      void* memory = arena->take<std::byte>(packed_mask_bytes(problem.mask, problem.rows, problem.keys));
      if (launch) {
        launches->then(
            [&] { return pack_mask(problem.mask, problem.rows, problem.keys, memory, &visibility.packed, stream); });
      } else {
        visibility.packed = outline_of_packed(problem.mask, problem.rows, problem.keys);
      }
    }
    const PlanShape shape = plan_shape(visibility, problem.batch, problem.heads, 0);
    void* memory = arena->take<std::byte>(plan_bytes(shape, problem.batch));
    if (launch) {
      launches->then([&] { return make_plan(visibility, shape, problem.batch, memory, &plan, stream); });
    } else {
      plan.head_divisor = shape.head_divisor;
    }
  }
};

bool is_aligned(const TokenView& tokens) {
  return reinterpret_cast<std::uintptr_t>(tokens.data) % 16 == 0 && tokens.batch_stride % 8 == 0 &&
         tokens.token_stride % 8 == 0 && tokens.head_stride % 8 == 0 && std::abs(tokens.token_stride) < 1 << 30;
}

ScoreRule score_rule_of(const AttentionProblem& problem) {
  ScoreRule rule;
  const double scale_log2 = problem.scale * kLog2E;
  rule.scale_log2 = static_cast<float>(scale_log2);
  if (problem.softcap > 0) {
    rule.softcap_log2 = static_cast<float>(problem.softcap * kLog2E);
    rule.inverse_softcap_log2 = static_cast<float>(1 / (problem.softcap * kLog2E));
    rule.inner_scale = static_cast<float>(2 * scale_log2 / problem.softcap);
  }
  rule.transforms = problem.softcap > 0 || problem.bias.defined() || problem.scale < 0;
  rule.multiplier = rule.transforms ? 1.0f : rule.scale_log2;
  return rule;
}

void fill(const AttentionProblem& problem, const PreparedVisibility& prepared, AttentionParams* params) {
  params->query = problem.query;
  params->key = problem.key;
  params->value = problem.value;
  params->bias = problem.bias;
  params->bias_by_row = problem.bias.defined() && problem.bias.rows > 1;
  params->batch = static_cast<std::int32_t>(problem.batch);
  params->rows = static_cast<std::int32_t>(problem.rows);
  params->keys = static_cast<std::int32_t>(problem.keys);
  params->heads = static_cast<std::int32_t>(problem.heads);
  params->key_heads = static_cast<std::int32_t>(problem.key_heads);
  params->head_dim = static_cast<std::int32_t>(problem.head_dim);
  params->group = static_cast<std::int32_t>(problem.group());
  params->scale = static_cast<float>(problem.scale);
  params->score = score_rule_of(problem);
  params->aligned =
      problem.head_dim % 8 == 0 && is_aligned(problem.query) && is_aligned(problem.key) && is_aligned(problem.value);
  params->visibility = prepared.visibility;
  params->plan = prepared.plan;
}

// Calls `launch` with an element and a bucket as types.
template <typename Launch>
cudaError_t by_type(const AttentionProblem& problem, Launch launch) {
  const auto by_bucket = [&](auto element) {
    using Element = decltype(element);
    switch (bucket_of(static_cast<int>(problem.head_dim))) {
      case 32:
        return launch.template operator()<Element, 32>();
      case 64:
        return launch.template operator()<Element, 64>();
      case 96:
        return launch.template operator()<Element, 96>();
      case 128:
        return launch.template operator()<Element, 128>();
      case 192:
        return launch.template operator()<Element, 192>();
      default:
        return launch.template operator()<Element, 256>();
    }
  };
  return problem.dtype == DType::kBFloat16 ? by_bucket(__nv_bfloat16()) : by_bucket(__half());
}

bool logging() {
  static const bool enabled = [] {
    const char* value = std::getenv("FLASH_DMATTN_LOG");
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
  }();
  return enabled;
}

void log_call(const char* direction, const AttentionProblem& problem, bool planned) {
  if (!logging()) return;
  std::fprintf(stderr, "flash_dmattn: cuda/portable %s %s B%lld H%lld Hkv%lld Sq%lld Sk%lld D%lld%s%s%s%s: %s\n",
               name_of(problem.dtype), direction, static_cast<long long>(problem.batch),
               static_cast<long long>(problem.heads), static_cast<long long>(problem.key_heads),
               static_cast<long long>(problem.rows), static_cast<long long>(problem.keys),
               static_cast<long long>(problem.head_dim), problem.is_causal ? " causal" : "",
               problem.mask.defined() ? " mask" : "", problem.interval_begin.defined() ? " intervals" : "",
               problem.bias.defined() ? " bias" : "",
               planned ? "planned on the device in chunks of 1024 rows" : "dense");
}

std::int64_t bias_elements(const BroadcastView& bias) { return bias.batches * bias.heads * bias.rows * bias.keys; }

// Scratch memory of the backward beside the plan.
struct BackwardScratch {
  RowFacts* row_facts = nullptr;
  std::int64_t padded_rows = 0;
  float *dquery_sums = nullptr, *dkey_sums = nullptr, *dvalue_sums = nullptr, *dbias_sums = nullptr;
  std::size_t dquery_bytes = 0, key_bytes = 0, dbias_bytes = 0;
  std::int32_t splits = 1;
  bool wants_sums = false;

  void take(const BackwardProblem& problem, const PreparedVisibility& prepared, Arena* arena) {
    const BackwardTiles tiles = backward_tiles(static_cast<int>(problem.head_dim));
    const auto bucket = static_cast<std::size_t>(bucket_of(static_cast<int>(problem.head_dim)));
    const std::int64_t group = problem.group();
    const std::int64_t key_blocks = (problem.keys + tiles.keys - 1) / tiles.keys * problem.batch * problem.key_heads;
    // Heads that see different keys have lists of their own; and a few tiles of keys alone leave most of a GPU idle.
    constexpr std::int64_t kFewBlocks = 128;
    const bool own_lists = prepared.planned && prepared.plan.head_divisor < group;
    const bool few = key_blocks < kFewBlocks && !problem.deterministic;
    splits = own_lists || few ? static_cast<std::int32_t>(group) : 1;
    wants_sums = prepared.planned || splits > 1;
    padded_rows = (problem.rows + tiles.rows - 1) / tiles.rows * tiles.rows;
    const auto row_count = static_cast<std::size_t>(problem.batch * problem.heads * padded_rows);
    row_facts = arena->take<RowFacts>(row_count);
    if (problem.dquery.defined()) {
      const std::size_t count = row_count * bucket;
      dquery_bytes = count * sizeof(float);
      dquery_sums = arena->take<float>(count);
    }
    const auto key_count = static_cast<std::size_t>(problem.batch * problem.keys * problem.key_heads) * bucket;
    key_bytes = key_count * sizeof(float);
    if (wants_sums && problem.dkey.defined()) dkey_sums = arena->take<float>(key_count);
    if (wants_sums && problem.dvalue.defined()) dvalue_sums = arena->take<float>(key_count);
    if (problem.dbias.defined()) {
      const auto count = static_cast<std::size_t>(bias_elements(problem.dbias));
      dbias_bytes = count * sizeof(float);
      dbias_sums =
          problem.dbias.dtype == DType::kFloat32 ? static_cast<float*>(problem.dbias.data) : arena->take<float>(count);
    }
  }
};

cudaError_t clear(float* sums, std::size_t bytes, cudaStream_t stream) {
  return sums == nullptr || bytes == 0 ? cudaSuccess : cudaMemsetAsync(sums, 0, bytes, stream);
}

}  // namespace

Status forward_workspace(const AttentionProblem& problem, std::size_t* bytes) {
  if (Status status = check_problem(problem); !status.ok()) return status;
  Arena arena(nullptr);
  PreparedVisibility().prepare(problem, &arena, false, nullptr, nullptr);
  *bytes = arena.used();
  return {};
}

Status forward(const ForwardProblem& problem, void* workspace, void* stream_handle) {
  auto* stream = static_cast<cudaStream_t>(stream_handle);
  Launches launches;
  Arena arena(workspace);
  PreparedVisibility prepared;
  prepared.prepare(problem, &arena, true, &launches, stream);
  ForwardParams params;
  fill(problem, prepared, &params);
  params.out = problem.out;
  params.lse = static_cast<float*>(problem.lse);
  params.aligned = params.aligned && is_aligned(problem.out);
  log_call("forward", problem, prepared.planned);
  launches.then([&] {
    return by_type(problem, [&]<typename Element, int kHeadDim>() {
      return launch_forward<Element, kHeadDim>(params, prepared.planned, stream);
    });
  });
  return launches.status();
}

Status backward_workspace(const BackwardProblem& problem, std::size_t* bytes) {
  if (Status status = check_problem(problem); !status.ok()) return status;
  Arena arena(nullptr);
  PreparedVisibility prepared;
  prepared.prepare(problem, &arena, false, nullptr, nullptr);
  BackwardScratch().take(problem, prepared, &arena);
  *bytes = arena.used();
  return {};
}

Status backward(const BackwardProblem& problem, void* workspace, void* stream_handle) {
  auto* stream = static_cast<cudaStream_t>(stream_handle);
  Launches launches;
  Arena arena(workspace);
  PreparedVisibility prepared;
  prepared.prepare(problem, &arena, true, &launches, stream);
  BackwardScratch scratch;
  scratch.take(problem, prepared, &arena);
  BackwardParams params;
  fill(problem, prepared, &params);
  params.dout = problem.dout;
  params.row_facts = scratch.row_facts;
  params.dquery_sums = scratch.dquery_sums;
  params.dkey = problem.dkey;
  params.dvalue = problem.dvalue;
  params.dkey_sums = scratch.dkey_sums;
  params.dvalue_sums = scratch.dvalue_sums;
  params.dbias_sums = scratch.dbias_sums;
  params.dbias = problem.dbias;
  params.wants_dkey = problem.dkey.defined();
  params.wants_dvalue = problem.dvalue.defined();
  params.splits = scratch.splits;
  params.uses_sums = scratch.wants_sums;
  params.aligned = params.aligned && is_aligned(problem.dout) &&
                   (!problem.dkey.defined() || is_aligned(problem.dkey)) &&
                   (!problem.dvalue.defined() || is_aligned(problem.dvalue));
  log_call("backward", problem, prepared.planned);
  launches.then([&] { return launch_row_facts(problem, scratch.padded_rows, scratch.row_facts, stream); })
      .then([&] { return clear(scratch.dquery_sums, scratch.dquery_bytes, stream); })
      .then([&] { return clear(scratch.dkey_sums, scratch.key_bytes, stream); })
      .then([&] { return clear(scratch.dvalue_sums, scratch.key_bytes, stream); })
      .then([&] { return clear(scratch.dbias_sums, scratch.dbias_bytes, stream); });
  if (problem.keys > 0) {
    launches.then([&] {
      return by_type(problem, [&]<typename Element, int kHeadDim>() {
        return launch_backward<Element, kHeadDim>(params, prepared.planned, stream);
      });
    });
  }
  if (problem.dquery.defined()) {
    launches.then([&] { return launch_query_gradients(problem, scratch.dquery_sums, stream); });
  }
  if (scratch.dkey_sums != nullptr && problem.keys > 0) {
    launches.then([&] { return launch_key_gradients(problem, scratch.dkey_sums, problem.dkey, stream); });
  }
  if (scratch.dvalue_sums != nullptr && problem.keys > 0) {
    launches.then([&] { return launch_key_gradients(problem, scratch.dvalue_sums, problem.dvalue, stream); });
  }
  if (problem.dbias.defined() && scratch.dbias_sums != problem.dbias.data && scratch.dbias_bytes > 0) {
    launches.then([&] {
      return launch_bias_gradients(scratch.dbias_sums, bias_elements(problem.dbias), problem.dbias.dtype,
                                   problem.dbias.data, stream);
    });
  }
  return launches.status();
}

Status selection_workspace(const SelectionProblem& problem, std::size_t* bytes) {
  *bytes = selection_workspace(problem);
  return {};
}

Status select_on_device(const SelectionProblem& problem, void* workspace, void* stream) {
  return status_of(select_keys(problem, workspace, static_cast<cudaStream_t>(stream)));
}

}  // namespace flash_dmattn::internal::cuda
