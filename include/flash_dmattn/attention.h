// Exact attention in which masks, lengths and the causal rule decide which keys each query sees, with
// an additive bias and its gradient. docs/semantics.md is the full contract.
//
//   B batch, Sq / Sk query / key length, H query heads, Hkv key heads (H % Hkv == 0; query head h
//   reads key head h / (H / Hkv)), D head dim of query and key, Dv of value (1 to 256 each).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "flash_dmattn/executor.h"
#include "flash_dmattn/export.h"
#include "flash_dmattn/selection.h"
#include "flash_dmattn/status.h"
#include "flash_dmattn/tensor.h"

namespace FLASH_DMATTN_API flash_dmattn {

// What make_attention_plan wrote, of one Visibility. It holds no pointers: it may be copied and moved.
struct AttentionPlan {
  const void* data = nullptr;  // aligned to kMemoryAlignment, on the device of the tensors; null: none
  std::size_t bytes = 0;       // as attention_plan_bytes says
};

// Each query row sees the keys that its list names. Entry e of a list names the keys e * block_size to
// e * block_size + block_size - 1 that exist; what begins outside of [0, Sk), such as -1, names none. In any order;
// repeats count once. Any strides.
struct KeyIndices {
  TensorView indices{};  // int32 (B or 1, H or Hkv or 1, Sq or 1, n); n may be 0, which hides all keys
  // Optional. int32 (B or 1, H or Hkv or 1, Sq or 1): only so many entries of a list count, the first ones (clamped to
  // [0, n]).
  TensorView lengths{};
  std::int64_t block_size = 1;  // 1 to 2^31 - 1

  bool defined() const { return indices.defined() || lengths.defined(); }
};

// Which keys each query row sees: those that all of its members show. Any strides.
struct Visibility {
  // Optional. bool, true = visible: (B or 1, H or Hkv or 1, Sq or 1, Sk or 1), per key
  // (B or 1, H or Hkv or 1, Sk or 1), or (Sq or 1, Sk or 1).
  TensorView mask{};
  // Optional: one interval of query rows per key, as select_keys makes them.
  KeyIntervals intervals{};
  // Optional: a list of keys per query row.
  KeyIndices indices{};
  // Optional. int32 (B): only the first seqlens_k[b] keys of batch element b exist (clamped to [0, Sk]).
  TensorView seqlens_k{};
  bool is_causal = false;  // row i sees keys j <= i + n - Sq, n = the keys that exist
  // Optional: the plan of the members above. Else every call that needs one makes its own. With a plan of another
  // Visibility results mean nothing.
  AttentionPlan plan{};
};

// Any strides and any alignment of the element type; only the stride of D or Dv must be 1 in query,
// key and value (and in out, dout and their gradients). `float16 | bfloat16 | float32 | float64` is "T".
struct AttentionInputs {
  TensorView query;  // (B, Sq, H, D), T
  TensorView key;    // (B, Sk, Hkv, D), T
  TensorView value;  // (B, Sk, Hkv, Dv), T
  // Optional, added to the score. T or float32, the same forms as the mask.
  TensorView bias{};
  // Optional (H), T or float32, any stride: a score without a key that every row of a query head has in its softmax
  // sum. out shrinks accordingly, lse leaves it out. -inf changes nothing, NaN and +inf make rows NaN; a row that sees
  // no key stays 0.
  TensorView sink{};
  Visibility visibility{};
};

// How scores are made, beside what is visible. {} are the defaults.
struct AttentionOptions {
  std::optional<double> scale{};  // default 1 / sqrt(D)
  // > 0: score = softcap * tanh(scale * q.k / softcap), then the bias. Between 1e-30 and 1e30, except in float64.
  double softcap = 0.0;
  bool deterministic = false;  // identical bits in repeated runs, for any number of threads
};

// Contiguous, not overlapping any input.
struct AttentionOutputs {
  TensorView out;  // (B, Sq, H, Dv), T
  TensorView lse;  // (B, H, Sq), float32 (float64 with float64): log sum exp of the visible scores, without the sink
  // Optional (B, H, Sq, 2), lse's dtype: the maximum of each row's scores and the logarithm of its sum apart, in a form
  // that is the backward's own. Of scores beyond some 1000 one number holds too little of both.
  TensorView row_stats{};
};

// What the backward reads beside the forward's inputs.
struct AttentionCotangents {
  TensorView out;     // the forward's result, any strides with Dv's 1
  TensorView lse;     // the forward's result, contiguous
  TensorView dout;    // (B, Sq, H, Dv), T: gradient of the loss by out
  TensorView dlse{};  // optional (B, H, Sq), lse's dtype, any strides: gradient of the loss by lse
  // Optional, the forward's result, contiguous. Without it gradients lose accuracy where scores are large: a rounding
  // of lse by 0.01 is 1 % of every probability.
  TensorView row_stats{};
};

// Contiguous; a view left undefined is not computed.
struct AttentionGradients {
  TensorView dquery{};  // (B, Sq, H, D), T
  TensorView dkey{};    // (B, Sk, Hkv, D), T
  TensorView dvalue{};  // (B, Sk, Hkv, Dv), T
  TensorView dbias{};   // the bias's shape and dtype; summed over every broadcast dimension
  TensorView dsink{};   // (H), the sink's dtype; summed over batch and rows
};

// How much work a call did, in score tiles and in scores (one query row x one key of one head).
struct AttentionCounters {
  std::int64_t tiles_visited = 0;    // tiles with at least one visible score
  std::int64_t tiles_partial = 0;    // of those, tiles that needed mask work
  std::int64_t tiles_empty = 0;      // tiles of the dense problem that were never touched
  std::int64_t kept_scores = 0;      // visible scores
  std::int64_t computed_scores = 0;  // scores whose product was evaluated
  std::int64_t copied_keys = 0;      // keys copied into tiles, counted once per chunk of rows and key head
  std::int64_t plans = 0;    // plans of a chunk of rows, or of some of its keys where rows are few, counted once
                             // for query heads that share one
  std::int64_t lists = 0;    // of those, plans whose keys are a list; the others' are a range
  std::int64_t bitmaps = 0;  // of those, plans that tell rows apart by a bitmap; the others by prefixes

  bool operator==(const AttentionCounters&) const = default;
};

// Who computes and where. {}: the CPU, by the library's own threads.
struct AttentionContext {
  Executor* executor = nullptr;           // null: default_executor()
  AttentionCounters* counters = nullptr;  // optional, CPU only; added to
  Device device{};                        // of all tensors and the workspace
};

// What the forward and the backward find out about the Visibility before they compute, made once to be used by both, or
// by many calls. Of query and key only their sizes are read; value may be left out, bias and options do not matter.
// query and key may have fewer heads and a smaller batch than those calls: as many as the Visibility tells apart. That
// is one head if all see the same, Hkv if the query heads of a key head do, and B = 1 if all batch elements see the
// same, which they do not with seqlens_k.
//
// 0 bytes: nothing is planned. That is so on the CPU, without mask and intervals, and where nothing is computed; a plan
// that is given all the same is ignored. Otherwise a plan that is given must have exactly that many bytes. A forward of
// few rows makes no use of a plan, its backward does. The two queries for bytes do not ask the device.
Status attention_plan_bytes(const AttentionInputs&, const AttentionOptions&, const AttentionContext&,
                            std::size_t* bytes);
Status attention_plan_workspace(const AttentionInputs&, const AttentionOptions&, const AttentionContext&,
                                std::size_t* bytes);
// Writes the plan into `bytes` bytes at `plan`, as many as attention_plan_bytes says, aligned to kMemoryAlignment. The
// workspace is scratch memory as below. Enqueued on the stream, never waits; the contents of mask and intervals are
// read then.
Status make_attention_plan(const AttentionInputs&, const AttentionOptions&, void* plan, std::size_t bytes,
                           void* workspace, std::size_t workspace_bytes, const AttentionContext&);

// Bytes of scratch memory the call needs, aligned to kMemoryAlignment. O(Sq + Sk) per head and worker. Less with a
// plan.
Status attention_forward_workspace(const AttentionInputs&, const AttentionOptions&, const AttentionContext&,
                                   std::size_t* bytes);
Status attention_backward_workspace(const AttentionInputs&, const AttentionCotangents&, const AttentionOptions&,
                                    const AttentionGradients&, const AttentionContext&, std::size_t* bytes);

// out and lse of attention over the visible keys. A row that sees none gets out = 0, lse = -inf.
// Everything is validated before any memory is touched. `workspace` holds at least the bytes that the
// query above gives for the same arguments; its contents do not matter.
Status attention_forward(const AttentionInputs&, const AttentionOptions&, const AttentionOutputs&, void* workspace,
                         std::size_t workspace_bytes, const AttentionContext& = {});

// The gradients that are asked for, given the forward's inputs and results.
Status attention_backward(const AttentionInputs&, const AttentionCotangents&, const AttentionOptions&,
                          const AttentionGradients&, void* workspace, std::size_t workspace_bytes,
                          const AttentionContext& = {});

// The same with scratch memory allocated for the duration of the call. CPU only.
Status attention_forward(const AttentionInputs&, const AttentionOptions&, const AttentionOutputs&,
                         const AttentionContext& = {});
Status attention_backward(const AttentionInputs&, const AttentionCotangents&, const AttentionOptions&,
                          const AttentionGradients&, const AttentionContext& = {});

}  // namespace FLASH_DMATTN_API flash_dmattn
