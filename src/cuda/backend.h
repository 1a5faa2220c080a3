// The CUDA backend, and what backend_table.cpp puts into its table. Work is enqueued on a stream of the current device;
// nothing waits (but for reports), nothing is allocated. Builds without CUDA have the table only, undefined
// (absent.cpp).
#pragma once

#include <cstddef>

#include "core/backend.h"
#include "core/problem.h"
#include "flash_dmattn/plan.h"
#include "flash_dmattn/status.h"

namespace flash_dmattn::internal::cuda {

extern const Backend kBackend;

// Of a problem with rows and keys. 0 bytes: it needs no plan. The two queries do not ask the device.
Status attention_plan_bytes(const AttentionProblem&, std::size_t* bytes);
Status attention_plan_workspace(const AttentionProblem&, std::size_t* bytes);
Status make_attention_plan(const AttentionProblem&, void* plan, void* workspace, void* stream);

// A problem that has a plan of its own needs no memory for one.
Status forward_workspace(const AttentionProblem&, std::size_t* bytes);
Status backward_workspace(const BackwardProblem&, std::size_t* bytes);
// `stream` is a cudaStream_t.
Status forward(const ForwardProblem&, void* workspace, void* stream);
Status backward(const BackwardProblem&, void* workspace, void* stream);

Status selection_workspace(const SelectionProblem&, std::size_t* bytes);
Status select_on_device(const SelectionProblem&, void* workspace, void* stream);
Status append_on_device(const KeptKeysProblem&, void* stream);

// These two wait for the stream, since they answer on the host. For a problem that is not empty.
Status plan_report_workspace(const AttentionProblem&, std::size_t* bytes);
Status plan_report(const AttentionProblem&, void* workspace, void* stream, PlanReport*);
Status mask_intervals_workspace(const MaskIntervalsProblem&, std::size_t* bytes);
Status find_intervals_on_device(const MaskIntervalsProblem&, void* workspace, void* stream, bool* exact);

}  // namespace flash_dmattn::internal::cuda
