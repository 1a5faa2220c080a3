#include "cuda/attention/call.h"

#include <cstdio>
#include <cstdlib>

#include "core/log.h"
#include "cuda/attention/score_rule.h"

namespace flash_dmattn::internal::cuda {

bool is_aligned(const TokenView& tokens) {
  if (!tokens.defined()) return true;
  return reinterpret_cast<std::uintptr_t>(tokens.data) % 16 == 0 && tokens.batch_stride % 8 == 0 &&
         tokens.token_stride % 8 == 0 && tokens.head_stride % 8 == 0 && std::abs(tokens.token_stride) < 1 << 30;
}

bool has_whole_pieces(const AttentionProblem& problem) {
  return problem.head_dim % 8 == 0 && problem.value_dim % 8 == 0;
}

void fill(const AttentionProblem& problem, const Gpu& gpu, const PreparedVisibility& prepared,
          AttentionParams* params) {
  params->query = problem.query;
  params->key = problem.key;
  params->value = problem.value;
  params->bias = problem.bias;
  params->mask = problem.visibility.mask;
  params->bias_by_row = problem.bias.defined() && problem.bias.rows > 1;
  params->batch = static_cast<std::int32_t>(problem.batch);
  params->rows = static_cast<std::int32_t>(problem.rows);
  params->keys = static_cast<std::int32_t>(problem.keys);
  params->heads = static_cast<std::int32_t>(problem.heads);
  params->key_heads = static_cast<std::int32_t>(problem.key_heads);
  params->head_dim = static_cast<std::int32_t>(problem.head_dim);
  params->value_dim = static_cast<std::int32_t>(problem.value_dim);
  params->group = static_cast<std::int32_t>(problem.group());
  params->score = score_rule_of(problem.scale, problem.softcap, problem.bias.defined());
  params->aligned =
      has_whole_pieces(problem) && is_aligned(problem.query) && is_aligned(problem.key) && is_aligned(problem.value);
  params->shared_limit = gpu.shared_limit;
  params->visibility = prepared.visibility;
  params->plan = prepared.plan;
  params->processors = gpu.processors;
}

ForwardParams forward_params(const ForwardProblem& problem, const Gpu& gpu, const PreparedVisibility& prepared) {
  ForwardParams params;
  fill(problem, gpu, prepared, &params);
  params.out = problem.out;
  params.lse = static_cast<float*>(problem.lse);
  params.row_stats = static_cast<RowStats*>(problem.row_stats);
  params.sink = problem.sink;
  params.aligned = params.aligned && is_aligned(problem.out);
  return params;
}

std::int64_t bias_elements(const BroadcastView& bias) { return bias.batches * bias.heads * bias.rows * bias.keys; }

std::int32_t* take_order(bool planned, Arena* arena) {
  return planned ? arena->take<std::int32_t>(kMostOrderedBlocks) : nullptr;
}

void ForwardScratch::arrange(const AttentionProblem& problem, Arena* arena) {
  prepared.arrange(problem, arena);
  order = take_order(prepared.planned, arena);
}

cudaError_t clear(void* sums, std::size_t bytes, cudaStream_t stream) {
  return sums == nullptr || bytes == 0 ? cudaSuccess : cudaMemsetAsync(sums, 0, bytes, stream);
}

const char* plan_kind(const PreparedVisibility& prepared) {
  if (prepared.given) return "by a plan made before, in chunks of 1024 rows";
  return prepared.planned ? "planned on the device in chunks of 1024 rows" : "dense";
}

void log_call(const char* family, const char* variant, const char* direction, const AttentionProblem& problem,
              const char* kind) {
  if (!logging()) return;
  std::fprintf(stderr, "flash_dmattn: cuda/%s%s %s: %s\n", family, variant, describe_call(direction, problem).c_str(),
               kind);
}

}  // namespace flash_dmattn::internal::cuda
