// Dynamic selection: which keys each query row sees, found from one score per key. The result is one interval
// of rows per key, because a key that drops out of the top w of a growing prefix never comes back
// (docs/selection.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/executor.h"
#include "flash_dmattn/export.h"
#include "flash_dmattn/status.h"
#include "flash_dmattn/tensor.h"

namespace FLASH_DMATTN_API flash_dmattn {

// Key j is visible to the query rows begin[j] <= row < end[j], which are numbered 0 to Sq whatever the
// alignment of the causal rule. Values outside of that are clamped; an empty interval hides the key.
// int32, (B or 1, H or Hkv or 1, Sk), any strides.
struct KeyIntervals {
  TensorView begin, end;
  // Optional. No row sees more keys than this, and each row at most one that the row before it does not, as it is with
  // the window_size of select_keys; 0: unknown. What CUDA plans is then smaller. Results are right whatever it says.
  std::int64_t window_size = 0;

  bool defined() const { return begin.defined() || end.defined(); }
};

// What select_keys chooses from.
//
// Packed documents: document d has the rows cu_seqlens_q[d] to cu_seqlens_q[d + 1] - 1, which see the keys
// cu_seqlens_k[d] to cu_seqlens_k[d + 1] - 1 and no others; the causal rule is aligned to the last row and key of each.
// So key j of document d is visible to the rows
//
//     cu_seqlens_q[d] + max(0, j - cu_seqlens_k[d] - (keys - rows of d))   (causal; else cu_seqlens_q[d])
//
// to cu_seqlens_q[d + 1] - 1: packed documents are a mask of KeyIntervals, which carry the causal rule. A call of
// attention that is given such intervals must leave Visibility::is_causal false, which aligns to the last of all keys.
//
// Bounds are int32 (documents + 1). Contents are clamped: to 0 and the number of rows or keys, and each bound to be no
// less than those before it. Rows and keys before the first bound and from the last one on belong to no document: rows
// see nothing, keys are hidden. Documents may be empty.
struct SelectionInputs {
  TensorView scores;       // (B, heads, Sk): float16, bfloat16, float32 or float64; any strides
  TensorView key_mask{};   // optional bool (B or 1, heads or 1, Sk): false hides the key from every row
  TensorView seqlens_k{};  // optional int32 (B): only the first seqlens_k[b] keys exist
  // Optional int32 (documents + 1), or (B, documents + 1) for bounds of each batch element's own: selection restarts in
  // every document, whose keys alone compete, and ends with it. cu_seqlens_k needs cu_seqlens_q, has its shape, and is
  // the same if not given. Neither goes with seqlens_k.
  TensorView cu_seqlens_q{}, cu_seqlens_k{};
};

// What is chosen: w of the keys of each row, for Sq rows.
struct SelectionOptions {
  std::int64_t window_size = 0;  // w, at least 0
  std::int64_t seqlen_q = 0;     // Sq
  // true: each row keeps the w highest of the keys that the causal rule shows it, and the intervals obey
  // that rule. false: the w highest of all keys, the same for every row.
  bool causal = true;
};

// Who computes and where. {}: the CPU, by the library's own threads.
struct SelectionContext {
  Executor* executor = nullptr;  // null: default_executor()
  Device device{};               // of all tensors and the workspace
};

// Bytes of scratch memory, aligned to kMemoryAlignment: O(w) per worker.
Status select_keys_workspace(const SelectionInputs&, const SelectionOptions&, const SelectionContext&,
                             std::size_t* bytes);

// Fills `intervals`, contiguous (B, heads, Sk). Among equal scores the newest key (highest index) stays; -0
// equals 0, NaNs are equal and rank highest. Scores of -inf or the dtype's lowest finite value are never
// kept. Keys that no row sees get the interval (0, 0). O(Sk log w) time per head.
Status select_keys(const SelectionInputs&, const SelectionOptions&, const KeyIntervals& intervals, void* workspace,
                   std::size_t workspace_bytes, const SelectionContext& = {});

// The same with scratch memory allocated for the duration of the call. CPU only.
Status select_keys(const SelectionInputs&, const SelectionOptions&, const KeyIntervals& intervals,
                   const SelectionContext& = {});

// Fills `intervals`, contiguous (1, 1, Sk), with what packed documents show, for attention of batch size 1 over
// seqlen_q rows. cu_seqlens_q and cu_seqlens_k: as in SelectionInputs; cu_seqlens_k may be undefined, and is
// cu_seqlens_q then. Keys that no row sees get the interval (0, 0). CPU only.
Status document_intervals(const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k, std::int64_t seqlen_q,
                          bool is_causal, const KeyIntervals& intervals);

}  // namespace FLASH_DMATTN_API flash_dmattn
