// What the public calls ask of a backend: a table of functions on validated problems.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/problem.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/executor.h"
#include "flash_dmattn/plan.h"
#include "flash_dmattn/status.h"

namespace flash_dmattn::internal {

// What a call brings along beside its problem. Each backend reads what it has a use for.
struct CallContext {
  Executor* executor = nullptr;           // CPU; null: default_executor()
  AttentionCounters* counters = nullptr;  // CPU; null: nobody counts
  void* stream = nullptr;                 // CUDA: a cudaStream_t

  Executor& workers() const { return executor != nullptr ? *executor : default_executor(); }
};

// Workspaces hold the bytes that the query before them gives for the same arguments, aligned to kMemoryAlignment.
// Problems of attention are never empty (AttentionProblem::empty): src/api answers those itself, with `check` and
// `clear`.
struct Backend {
  // How many bytes of memory a problem needs. Left null: none.
  template <typename Problem>
  using Query = Status (*)(const Problem&, const CallContext&, std::size_t* bytes);

  // Whether this backend takes the problem, which may be empty here, on the current device. Left null: always.
  Status (*check)(const AttentionProblem&) = nullptr;
  // Fills memory with zeros.
  Status (*clear)(void* memory, std::size_t bytes, const CallContext&) = nullptr;

  // Plans that outlive a call, of problems with keys. The queries do not ask the device. Left null: nothing is planned.
  Query<AttentionProblem> attention_plan_bytes = nullptr;
  Query<AttentionProblem> attention_plan_workspace = nullptr;
  Status (*make_attention_plan)(const AttentionProblem&, void* plan, void* workspace, const CallContext&) = nullptr;

  Query<AttentionProblem> forward_workspace = nullptr;
  Status (*forward)(const ForwardProblem&, void* workspace, const CallContext&) = nullptr;
  Query<BackwardProblem> backward_workspace = nullptr;
  Status (*backward)(const BackwardProblem&, void* workspace, const CallContext&) = nullptr;

  // Answers on the host, as the intervals of a mask do: both wait for the device.
  Query<AttentionProblem> plan_report_workspace = nullptr;
  Status (*plan_report)(const AttentionProblem&, void* workspace, const CallContext&, PlanReport*) = nullptr;
  // Left null: plans cannot be written out.
  Status (*plan_chunks)(const AttentionProblem&, std::int64_t batch, std::int64_t head, const CallContext&,
                        std::vector<PlannedChunk>*) = nullptr;

  Query<SelectionProblem> selection_workspace = nullptr;
  Status (*select_keys)(const SelectionProblem&, void* workspace, const CallContext&) = nullptr;

  Status (*append_kept_keys)(const KeptKeysProblem&, const CallContext&) = nullptr;

  Query<MaskIntervalsProblem> mask_intervals_workspace = nullptr;
  Status (*mask_intervals)(const MaskIntervalsProblem&, void* workspace, const CallContext&, bool* exact) = nullptr;

  bool defined() const { return forward != nullptr; }  // false: this build has no such backend
};

}  // namespace flash_dmattn::internal
