// What hides keys, made ready for kernels: masks packed, keys planned. The first steps of every call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/arena.h"
#include "core/problem.h"
#include "cuda/plan/device_plan.h"
#include "cuda/plan/make_plan.h"
#include "cuda/plan/visibility.h"
#include "cuda/status_of.h"
#include "flash_dmattn/status.h"

namespace flash_dmattn::internal::cuda {

// Runs launches one after another until one fails.
class Launches {
 public:
  template <typename Launch>
  Launches& then(Launch launch) {
    if (error_ == cudaSuccess) error_ = launch();
    return *this;
  }
  Status status() const { return status_of(error_); }

 private:
  cudaError_t error_ = cudaSuccess;
};

// Whether this backend takes the problem, on the current device.
Status check_problem(const AttentionProblem& problem);
// The part of check_problem that making a plan needs, too, and that asks no device: that no mask by row stands beside
// lists of keys, and no launch has more blocks of rows than a grid may.
Status check_blocks(const AttentionProblem& problem);

// Whether a plan is needed: the causal rule and lengths alone are arithmetic.
bool is_planned(const AttentionProblem& problem);

// What hides keys, in the form in which it was given. Lists of keys and a mask that differs by row are left out: their
// packed words are part of a plan.
Visibility visibility_of(const AttentionProblem& problem);

// Visibility and plan of a call. First the memory is arranged, by the same code whether the arena has some or only
// measures; then what lies there is written.
class PreparedVisibility {
 public:
  Visibility visibility;
  DevicePlan plan;
  bool planned = false;
  bool given = false;  // made before the call

  // What the call needs. A plan that the problem brings along stays where it is, and nothing is left to write. `once`:
  // lists have every key once. If those of lists of keys per query that are brought along do not, the call has some of
  // its own, of the packed words that are there.
  void arrange(const AttentionProblem& problem, Arena* arena, bool once = false);
  // All that is read of a plan, also of a problem that is computed without one: packed words and units, chunks, keys,
  // units and full units of tiles, tiles of units, one array after another. Where they lie follows from shapes and
  // strides (python/flash_dmattn/_device_plan.py counts their bytes, too).
  void arrange_plan(const AttentionProblem& problem, Arena* arena);
  // What is read only while the plan is written.
  void arrange_staging(const AttentionProblem& problem, Arena* arena);

  void write(const AttentionProblem& problem, Launches* launches, cudaStream_t stream);
  // Whether that launches a plan's kernel.
  bool is_written() const { return !given && plan_memory_ != nullptr; }

 private:
  void arrange_words(const AttentionProblem& problem, Arena* arena);
  void arrange_lists(const AttentionProblem& problem, bool once, Arena* arena);

  PlanShape shape_;
  bool packed_before_ = false;  // the call
  void *packed_memory_ = nullptr, *plan_memory_ = nullptr, *staging_ = nullptr;
};

}  // namespace flash_dmattn::internal::cuda
