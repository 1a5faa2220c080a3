// The CPU backend's entry points, called by src/api with validated problems.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/problem.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/executor.h"
#include "flash_dmattn/plan.h"

namespace flash_dmattn::internal::cpu {

// fp16, bf16 and fp32 on the fastest kernels that this CPU has.
std::size_t forward_workspace(const AttentionProblem&, const Executor&);
std::size_t backward_workspace(const BackwardProblem&, const Executor&);
void forward(const ForwardProblem&, void* workspace, Executor&, AttentionCounters*);
void backward(const BackwardProblem&, void* workspace, Executor&, AttentionCounters*);

// The same planning without the attention; both for problems that are not empty.
void plan_report(const AttentionProblem&, Executor&, PlanReport*);
void plan_chunks(const AttentionProblem&, Executor&, std::int64_t batch, std::int64_t head, std::vector<PlannedChunk>*);

// fp64: a plain row-by-row implementation for gradient checks. Needs no workspace.
void forward_fp64(const ForwardProblem&, Executor&, AttentionCounters*);
void backward_fp64(const BackwardProblem&, Executor&, AttentionCounters*);

}  // namespace flash_dmattn::internal::cpu
