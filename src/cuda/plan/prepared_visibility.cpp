#include "cuda/plan/prepared_visibility.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "cuda/attention/head_dims.h"
#include "cuda/device_kernels.h"
#include "cuda/plan/pack_indices.h"
#include "cuda/plan/pack_mask.h"

namespace flash_dmattn::internal::cuda {
namespace {

// A mask with an entry of its own for every row is packed; others are read as they are, once a key.
bool differs_by_row(const BroadcastView& mask) { return mask.defined() && without_copies(mask).rows > 1; }

// Lists of keys are packed as well, whether rows have lists of their own or share one.
bool needs_packing(const AttentionProblem& problem) {
  return problem.visibility.indices.defined() || differs_by_row(problem.visibility.mask);
}

// How many keys the rows of a chunk see at most, or how many a list has room for; 0: unknown.
std::int64_t list_limit(const AttentionProblem& problem) {
  // Rows that choose for themselves together see nearly all keys, and may be worth a list.
  if (problem.visibility.indices.defined()) return problem.keys;
  const std::int64_t window_size = problem.visibility.intervals.window_size;
  return window_size == 0 ? 0 : std::min(window_size, problem.keys) + kChunkRows;
}

// Of the parts of lists of keys per query (PlanShape::part_units). The smaller parts are, the fewer tiles are visited,
// and the more tiles of keys there are: a backward begins one and adds up its gradients in the time of three to four
// steps, and has a step for each query head that shares the list. Half as many units take 1 to 2.5 % less where four
// heads do, twice as many 1 % less where one has its own.
constexpr int kPartUnits = 4;

}  // namespace

Visibility visibility_of(const AttentionProblem& problem) {
  const VisibilityViews& views = problem.visibility;
  Visibility visibility;
  visibility.rows = static_cast<std::int32_t>(problem.rows);
  visibility.keys = static_cast<std::int32_t>(problem.keys);
  visibility.is_causal = views.is_causal;
  visibility.seqlens = views.seqlens;
  visibility.seqlens_stride = views.seqlens_stride;
  visibility.begin = views.intervals.begin;
  visibility.end = views.intervals.end;
  if (views.mask.defined() && !differs_by_row(views.mask)) visibility.key_mask = without_copies(views.mask);
  return visibility;
}

Status check_blocks(const AttentionProblem& problem) {
  if (problem.visibility.indices.defined() && differs_by_row(problem.visibility.mask)) {
    return Status::invalid("mask", "must be the same for every row on CUDA where indices are given",
                           "a mask of " + std::to_string(problem.visibility.mask.rows) + " rows");
  }
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();  // of a launch
  constexpr std::int64_t kLeastRows = 32;                                   // of a block
  if (problem.batch * problem.heads * ((problem.rows + kLeastRows - 1) / kLeastRows) <= kMost) return {};
  return Status::invalid("query", "must have fewer than 2^31 tiles of 32 rows in all heads and batch elements on CUDA",
                         "B " + std::to_string(problem.batch) + ", Sq " + std::to_string(problem.rows) + ", H " +
                             std::to_string(problem.heads));
}

Status check_problem(const AttentionProblem& problem) {
  if (Status status = check_current_device(); !status.ok()) return status;
  if (problem.dtype != DType::kFloat16 && problem.dtype != DType::kBFloat16) {
    return Status::invalid("query", "must be float16 or bfloat16 on CUDA",
                           std::string("query ") + name_of(problem.dtype));
  }
  if (bucket_of(problem.head_dim) == 0) {
    return Status::invalid("head_dim",
                           "must be at most " + std::to_string(kHeadDimBuckets.back()) + " in this build on CUDA",
                           "D " + std::to_string(problem.head_dim));
  }
  if (bucket_of(problem.value_dim) == 0) {
    return Status::invalid(
        "value", "must have a head dim of at most " + std::to_string(kHeadDimBuckets.back()) + " in this build on CUDA",
        "Dv " + std::to_string(problem.value_dim));
  }
  return check_blocks(problem);
}

bool is_planned(const AttentionProblem& problem) {
  const VisibilityViews& visibility = problem.visibility;
  return visibility.mask.defined() || visibility.intervals.defined() || visibility.indices.defined();
}

void PreparedVisibility::arrange(const AttentionProblem& problem, Arena* arena, bool once) {
  planned = is_planned(problem);
  if (!planned) {
    visibility = visibility_of(problem);
    return;
  }
  Arena before(const_cast<void*>(problem.visibility.plan.data));  // read only
  packed_before_ = problem.visibility.plan.data != nullptr && problem.keys > 0;
  arrange_words(problem, packed_before_ ? &before : arena);
  given = packed_before_ && !(once && problem.visibility.indices.defined());
  arrange_lists(problem, once, given ? &before : arena);
  if (!given) arrange_staging(problem, arena);
}

void PreparedVisibility::arrange_plan(const AttentionProblem& problem, Arena* arena) {
  arrange_words(problem, arena);
  arrange_lists(problem, false, arena);
}

void PreparedVisibility::arrange_words(const AttentionProblem& problem, Arena* arena) {
  visibility = visibility_of(problem);
  if (!needs_packing(problem)) return;
  const BroadcastView& mask = problem.visibility.mask;
  const IndexViews& indices = problem.visibility.indices;
  packed_memory_ = arena->take<std::byte>(indices.defined() ? packed_indices_bytes(indices, problem.rows, problem.keys)
                                                            : packed_mask_bytes(mask, problem.rows, problem.keys));
  visibility.packed = indices.defined() ? packed_indices_at(indices, problem.rows, problem.keys, packed_memory_)
                                        : packed_mask_at(mask, problem.rows, problem.keys, packed_memory_);
  // While only measured there are no words, and yet the plan's shape depends on there being some.
  static const std::uint32_t kNoWords = 0;
  if (packed_memory_ == nullptr) visibility.packed.words = &kNoWords;
}

void PreparedVisibility::arrange_lists(const AttentionProblem& problem, bool once, Arena* arena) {
  const bool chosen = problem.visibility.indices.defined();
  shape_ = plan_shape(visibility, problem.batch, problem.heads, list_limit(problem),
                      chosen ? ListOrder::kUnits : ListOrder::kFirstUnit, once ? kChunkUnits : kPartUnits);
  plan_memory_ = arena->take<std::byte>(plan_bytes(shape_, problem.batch));
  plan = plan_at(shape_, problem.batch, plan_memory_);
}

void PreparedVisibility::arrange_staging(const AttentionProblem& problem, Arena* arena) {
  staging_ = arena->take<std::byte>(staging_bytes(shape_, problem.batch));
}

void PreparedVisibility::write(const AttentionProblem& problem, Launches* launches, cudaStream_t stream) {
  if (!is_written()) return;  // written before, or nothing to plan
  if (needs_packing(problem) && !packed_before_) {
    launches->then([&] {
      const VisibilityViews& views = problem.visibility;
      return views.indices.defined()
                 ? pack_indices(views.indices, problem.rows, problem.keys, views.is_causal, current_gpu().shared_limit,
                                packed_memory_, &visibility.packed, stream)
                 : pack_mask(views.mask, problem.rows, problem.keys, packed_memory_, &visibility.packed, stream);
    });
  }
  launches->then([&] { return make_plan(visibility, shape_, problem.batch, plan_memory_, staging_, &plan, stream); });
}

}  // namespace flash_dmattn::internal::cuda
