#include "cuda/prepared_visibility.h"

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "cuda/device_kernels.h"
#include "cuda/plan/full_tiles.h"
#include "cuda/plan/make_plan.h"
#include "cuda/plan/pack_mask.h"

namespace flash_dmattn::internal::cuda {
namespace {

// A mask with an entry of its own for every row is packed; others are read as they are, once a key.
bool needs_packing(const AttentionProblem& problem) {
  return problem.mask.defined() && without_copies(problem.mask).rows > 1;
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

}  // namespace

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

Status check_problem(const AttentionProblem& problem) {
  if (Status status = check_current_device(); !status.ok()) return status;
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

bool is_planned(const AttentionProblem& problem) { return problem.mask.defined() || problem.interval_begin.defined(); }

void PreparedVisibility::prepare(const AttentionProblem& problem, Arena* arena, bool launch, Launches* launches,
                                 cudaStream_t stream) {
  planned = is_planned(problem);
  if (planned) {
    make(problem, arena, launch, launches, stream);
  } else {
    visibility = visibility_of(problem);
  }
}

void PreparedVisibility::make(const AttentionProblem& problem, Arena* arena, bool launch, Launches* launches,
                              cudaStream_t stream) {
  visibility = visibility_of(problem);
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
  const std::int64_t plans = (shape.per_batch ? problem.batch : 1) * shape.plan_heads;
  void* memory = arena->take<std::byte>(plan_bytes(shape, problem.batch));
  void* full_memory = arena->take<std::byte>(full_tiles_bytes(plans, shape.chunk_count, shape.tiles));
  if (launch) {
    launches->then([&] { return make_plan(visibility, shape, problem.batch, memory, &plan, stream); }).then([&] {
      return find_full_tiles(visibility, plans, full_memory, &plan, stream);
    });
  } else {
    // What sizes of scratch memory depend on.
    plan.head_divisor = shape.head_divisor;
    plan.chunk_count = shape.chunk_count;
    plan.capacity = shape.capacity;
  }
}

}  // namespace flash_dmattn::internal::cuda
