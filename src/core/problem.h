// Validated arguments in the one form that every backend reads. They obey docs/semantics.md; nobody checks them again.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/attention.h"
#include "flash_dmattn/tensor.h"

namespace flash_dmattn::internal {

// (B, S, heads, D or Dv) tokens of any strides, the last being 1. Strides in elements.
struct TokenView {
  void* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  constexpr bool defined() const { return data != nullptr; }
};

// A mask, a bias or a bias gradient as (batch, head, row, key); each size is 1 or full. A dimension of
// size 1 has stride 0 here, whatever the caller's stride was, so that reading needs no case for it.
struct BroadcastView {
  void* data = nullptr;
  DType dtype = DType::kBool;
  std::int64_t batches = 1, heads = 1, rows = 1, keys = 1;
  std::int64_t batch_stride = 0, head_stride = 0, row_stride = 0, key_stride = 0;
  std::int64_t head_divisor = 1;  // query head h reads head h / head_divisor: 1, H / Hkv or H

  constexpr bool defined() const { return data != nullptr; }
  // Element offset of (batch b, query head h), row 0, key 0.
  constexpr std::int64_t offset(std::int64_t b, std::int64_t h) const {
    return b * batch_stride + (h / head_divisor) * head_stride;
  }
};

// A number for each query head.
struct HeadView {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t stride = 0;

  constexpr bool defined() const { return data != nullptr; }
};

// int32 per key (row stride 0), both or neither.
struct IntervalViews {
  BroadcastView begin, end;
  std::int64_t window_size = 0;  // KeyIntervals::window_size

  constexpr bool defined() const { return begin.defined(); }
};

// KeyIndices. int32; lists without entries have no memory, but are lists all the same.
struct IndexViews {
  BroadcastView entries;        // (batch, head, row, entry): what other views have for every key
  BroadcastView lengths;        // (batch, head, row); data null: whole lists count
  std::int64_t block_size = 0;  // 0: no lists

  constexpr bool defined() const { return block_size > 0; }
  // Whether rows of a head may have different lists.
  constexpr bool differ_by_row() const { return entries.row_stride != 0 || lengths.row_stride != 0; }
};

// A call's Visibility as views, which planning reads; what kernels on a GPU see of it is cuda::Visibility.
struct VisibilityViews {
  BroadcastView mask;  // data null: none
  IntervalViews intervals;
  IndexViews indices;
  const std::int32_t* seqlens = nullptr;  // null: every key exists
  std::int64_t seqlens_stride = 0;
  bool is_causal = false;
  AttentionPlan plan;  // data null: none given
};

struct AttentionProblem {
  DType dtype = DType::kFloat32;  // of query, key, value, out and their gradients
  std::int64_t batch = 0, rows = 0, keys = 0, heads = 0, key_heads = 0;
  std::int64_t head_dim = 0;   // of query and key
  std::int64_t value_dim = 0;  // the head dim of value and out
  TokenView query, key, value;
  VisibilityViews visibility;
  BroadcastView bias;  // data null: none
  HeadView sink;       // data null: none
  double scale = 1.0, softcap = 0.0;
  bool deterministic = false;

  constexpr std::int64_t group() const { return key_heads > 0 ? heads / key_heads : 1; }
  // The keys that exist for batch element b.
  std::int64_t key_count(std::int64_t b) const {
    if (visibility.seqlens == nullptr) return keys;
    const std::int64_t count = visibility.seqlens[b * visibility.seqlens_stride];
    return count < 0 ? 0 : count < keys ? count : keys;
  }
  // Nothing to compute: out and lse have no elements.
  bool empty() const { return batch == 0 || rows == 0 || heads == 0; }
};

struct ForwardProblem : AttentionProblem {
  TokenView out;              // contiguous
  void* lse = nullptr;        // (B, H, Sq) contiguous
  void* row_stats = nullptr;  // (B, H, Sq, 2) contiguous; null: not wanted
};

struct BackwardProblem : AttentionProblem {
  TokenView out, dout;
  const void* lse = nullptr;        // (B, H, Sq) contiguous
  const void* row_stats = nullptr;  // (B, H, Sq, 2) contiguous; null: lse has to do
  const void* dlse = nullptr;       // (B, H, Sq) or null
  std::int64_t dlse_batch_stride = 0, dlse_head_stride = 0, dlse_row_stride = 0;
  TokenView dquery, dkey, dvalue;  // contiguous; data null: not asked for
  BroadcastView dbias;             // contiguous in the bias's own shape; data null: not asked for
  HeadView dsink;                  // contiguous, the sink's dtype; data null: not asked for
};

// Where packed documents begin and the last ends: `documents` + 1 numbers for every batch element, any contents.
struct DocumentBounds {
  const std::int32_t* data = nullptr;
  std::int64_t batch_stride = 0, stride = 0;  // in elements
};

// Dynamic selection: which rows see a key, from one score for each.
struct SelectionProblem {
  std::int64_t batch = 0, heads = 0, keys = 0, rows = 0, window = 0;
  bool causal = true;
  const void* scores = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t score_strides[3] = {};  // batch, head, key; in elements
  const std::uint8_t* key_mask = nullptr;
  std::int64_t mask_strides[3] = {};  // 0 where broadcast
  const std::int32_t* seqlens = nullptr;
  std::int64_t seqlens_stride = 0;
  std::int32_t *begin = nullptr, *end = nullptr;  // contiguous (batch, heads, keys)
  // Documents, each of which selects for itself. Without bounds all rows and keys are one.
  std::int64_t documents = 0;
  DocumentBounds row_bounds{}, key_bounds{};

  bool is_packed() const { return row_bounds.data != nullptr; }
};

// Packed documents as intervals of rows per key.
struct DocumentIntervalsProblem {
  std::int64_t rows = 0, keys = 0, documents = 0;
  bool causal = false;
  DocumentBounds row_bounds{}, key_bounds{};
  std::int32_t *begin = nullptr, *end = nullptr;  // contiguous (keys)
};

// New keys of a cache, and the best keys that are kept up to date with them.
struct KeptKeysProblem {
  std::int64_t batch = 0, heads = 0, window = 0, new_keys = 0;
  DType dtype = DType::kFloat32;    // of both scores
  std::int32_t* indices = nullptr;  // contiguous (batch, heads, window)
  void* scores = nullptr;           // contiguous (batch, heads, window)
  const void* new_scores = nullptr;
  std::int64_t new_score_strides[3] = {};  // batch, head, new key; in elements
  const std::int32_t* positions = nullptr;
  std::int64_t positions_stride = 0;
  std::int32_t* lists = nullptr;             // contiguous (batch, heads, new_keys, window); null: not wanted
  std::int32_t* lengths = nullptr;           // contiguous (batch, heads); null: nobody asks
  const void* cache_scores = nullptr;        // null: lengths are not looked at
  std::int64_t cache_keys = 0;               // that have scores there
  std::int64_t cache_score_strides[3] = {};  // batch, head, key; in elements
};

// The number of keys in front of a new one, and the length of a cache that ends with `count` of them, as it is kept.
constexpr std::int64_t keys_before(std::int64_t position) { return position < 0 ? 0 : position; }
constexpr std::int32_t length_after(std::int64_t position, std::int64_t count) {
  const std::int64_t length = keys_before(position + count);
  return static_cast<std::int32_t>(length < INT32_MAX ? length : INT32_MAX);
}
// Whether a call of at least one (batch, head) has anything to do.
constexpr bool changes_something(const KeptKeysProblem& problem) {
  return problem.lengths != nullptr || (problem.window > 0 && problem.new_keys > 0);
}

// The intervals that say the same as a dense mask, if there are any.
struct MaskIntervalsProblem {
  std::int64_t batch = 0, heads = 0, rows = 0, keys = 0;
  bool is_causal = false;
  const std::uint8_t* mask = nullptr;
  std::int64_t strides[4] = {};                   // batch, head, row, key
  std::int32_t *begin = nullptr, *end = nullptr;  // contiguous (batch, heads, keys)
};

}  // namespace flash_dmattn::internal
