// Dynamic selection: which keys each query row sees, found from one score per key. The result is one interval
// of rows per key, because a key that drops out of the top w of a growing prefix never comes back
// (docs/selection.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/executor.h"
#include "flash_dmattn/status.h"
#include "flash_dmattn/tensor.h"

namespace flash_dmattn {

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

struct SelectionInputs {
  TensorView scores;       // (B, heads, Sk): float16, bfloat16, float32 or float64; any strides
  TensorView key_mask{};   // optional bool (B or 1, heads or 1, Sk): false hides the key from every row
  TensorView seqlens_k{};  // optional int32 (B): only the first seqlens_k[b] keys exist
};

struct SelectionOptions {
  std::int64_t window_size = 0;  // w, at least 0
  std::int64_t seqlen_q = 0;     // Sq
  // true: each row keeps the w highest of the keys that the causal rule shows it, and the intervals obey
  // that rule. false: the w highest of all keys, the same for every row.
  bool causal = true;
};

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

}  // namespace flash_dmattn
