// The only place where arguments are checked.
#pragma once

#include "core/problem.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/kept_keys.h"
#include "flash_dmattn/selection.h"
#include "flash_dmattn/status.h"

namespace flash_dmattn::internal {

// Every rule of docs/semantics.md on the arguments; touches no tensor memory.
Status make_forward_problem(const AttentionInputs&, const AttentionOptions&, const AttentionOutputs&, ForwardProblem*);
Status make_backward_problem(const AttentionInputs&, const AttentionCotangents&, const AttentionOptions&,
                             const AttentionGradients&, BackwardProblem*);
// For workspace queries, which know no outputs yet.
Status make_problem(const AttentionInputs&, const AttentionOptions&, AttentionProblem*);
// For plans, which look at no value: it may be left out.
Status make_planned_problem(AttentionInputs, const AttentionOptions&, AttentionProblem*);

// A selection; without the intervals for workspace queries, which know none yet.
Status make_selection_problem(const SelectionInputs&, const SelectionOptions&, const KeyIntervals*, SelectionProblem*);

Status make_document_problem(const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k, std::int64_t seqlen_q,
                             bool causal, const KeyIntervals& intervals, DocumentIntervalsProblem*);

// Defined in validate_kept_keys.cpp.
Status make_kept_keys_problem(const NewKeys&, const KeptKeys&, const TensorView& lists, KeptKeysProblem*);

// All of it but is_causal; without the intervals for workspace queries.
Status make_mask_intervals_problem(const TensorView& mask, const KeyIntervals*, MaskIntervalsProblem*);

}  // namespace flash_dmattn::internal
