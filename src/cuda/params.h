// What the attention kernels take: validated arguments (api/problem.h) with everything derived on the host.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>

#include "api/problem.h"
#include "cuda/plan/device_plan.h"
#include "cuda/plan/visibility.h"

namespace flash_dmattn::internal::cuda {

// How scores are made from products, in units of log2, so that exp2 suffices.
struct ScoreRule {
  // Whether the score is more than scale_log2 * product with a positive scale: softcap, bias or a negative scale. Else
  // the scale is applied inside the exponent only.
  bool transforms = false;
  float multiplier = 1;            // inside the exponent: scale_log2, or 1 if `transforms`
  float scale_log2 = 1;            // scale * log2(e)
  float softcap_log2 = 0;          // softcap * log2(e), 0: none
  float inverse_softcap_log2 = 0;  // 1 / softcap_log2, 0: none
  float inner_scale = 0;           // 2 * log2(e) * scale / softcap: tanh(x) = 1 - 2 / (2^(2 x log2 e) + 1)
};

struct AttentionParams {
  TokenView query, key, value;  // (B, Sq, H, D), (B, Sk, Hkv, D)
  BroadcastView bias;           // data null: none
  bool bias_by_row = false;     // it has, or its gradient has, rows of its own
  std::int32_t batch = 0, rows = 0, keys = 0, heads = 0, key_heads = 0, head_dim = 0;
  std::int32_t group = 1;  // query heads of a key head
  float scale = 1;
  ScoreRule score;
  // Every row of query, key, value (and out, dout) is whole pieces of 16 aligned bytes. Else they are read by element.
  bool aligned = false;
  Visibility visibility;
  DevicePlan plan;  // unset for what the causal rule and lengths alone hide
};

struct ForwardParams : AttentionParams {
  TokenView out;         // (B, Sq, H, D) contiguous
  float* lse = nullptr;  // (B, H, Sq) contiguous
};

// What the backward knows of a row: x is its lse in units of log2, +inf for a row that sees no key or does not exist,
// so that its probabilities come out as 0; y is delta, the sum over D of dout * out, less dlse (0 for such rows).
using RowFacts = float2;

struct BackwardParams : AttentionParams {
  TokenView dout;
  const RowFacts* row_facts = nullptr;  // RowFacts (B, H, Sq rounded up to whole tiles of rows)
  float* dquery_sums = nullptr;  // (B, H, row tiles, tile in the order of the kernel's registers); null: not asked for
  TokenView dkey, dvalue;        // contiguous, written when there is no plan; data null: not asked for
  float* dkey_sums = nullptr;    // (B, Sk, Hkv, D) fp32, added to when there is a plan or the work is split
  float* dvalue_sums = nullptr;
  float* dbias_sums = nullptr;  // fp32 in the bias's own (contiguous) shape; null: not asked for
  BroadcastView dbias;          // its strides, data null: not asked for
  bool wants_dkey = false, wants_dvalue = false;
  bool uses_sums = false;   // dkey_sums and dvalue_sums, those that are asked for
  std::int32_t splits = 1;  // blocks that share a tile of keys, each with some of the group's heads
};

}  // namespace flash_dmattn::internal::cuda
