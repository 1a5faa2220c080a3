// The CPU's backends, and what backend_table.cpp puts into their tables. Problems of attention are not empty.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/backend.h"
#include "core/problem.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/executor.h"
#include "flash_dmattn/plan.h"

namespace flash_dmattn::internal::cpu {

extern const Backend kBackend;         // fp16, bf16 and fp32
extern const Backend kFloat64Backend;  // fp64: a plain row-by-row implementation for gradient checks

// fp16, bf16 and fp32 on the fastest kernels that this CPU has.
std::size_t forward_workspace(const AttentionProblem&, const Executor&);
std::size_t backward_workspace(const BackwardProblem&, const Executor&);
void forward(const ForwardProblem&, void* workspace, Executor&, AttentionCounters*);
void backward(const BackwardProblem&, void* workspace, Executor&, AttentionCounters*);

// The same planning without the attention.
void plan_report(const AttentionProblem&, Executor&, PlanReport*);
void plan_chunks(const AttentionProblem&, Executor&, std::int64_t batch, std::int64_t head, std::vector<PlannedChunk>*);

// fp64, without workspace.
void forward_fp64(const ForwardProblem&, Executor&, AttentionCounters*);
void backward_fp64(const BackwardProblem&, Executor&, AttentionCounters*);
void plan_report_fp64(const AttentionProblem&, Executor&, PlanReport*);

}  // namespace flash_dmattn::internal::cpu
