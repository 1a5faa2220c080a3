// Which rows and which keys a block has.
#pragma once

#include <cstdint>

#include "cuda/decode/config.h"
#include "cuda/plan/visibility.cuh"
#include "cuda/ptx/dependent_launch.cuh"

namespace flash_dmattn::internal::cuda {

// What a block works on; in shared memory, because kernels have no register to spare for it. Its rows are (query row,
// head) pairs: row m is pair first + m of the rows * group pairs of the key head, the heads of a query row side by
// side.
struct DecodeBlock {
  std::int32_t batch, key_head, split;
  std::int32_t existing;    // keys of the batch element
  std::int32_t begin, end;  // of those, the split's
  std::int32_t first, count;
  const std::uint8_t* mask;  // row 0 of its first head
  // Divided once: a division takes as long as some forty instructions, and a block of few keys does little else.
  std::int32_t rows[kDecodeRows], heads[kDecodeRows];

  __device__ std::int32_t row(int m) const { return rows[m]; }
  __device__ std::int32_t head(int m) const { return heads[m]; }
};

// By all threads, before they read what other kernels may have written; leaves a barrier behind. `has_lists`: the
// split's keys lie anywhere.
__device__ inline void describe_block(const DecodeParams& params, bool has_lists, DecodeBlock& block) {
  std::uint32_t index = blockIdx.x;
  std::int32_t place[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const std::uint32_t quotient = params.by_counts[i].quotient(index);
    place[i] = static_cast<std::int32_t>(index - quotient * params.by_counts[i].value());
    index = quotient;
  }
  // Blocks that run at the same time read the same part of all heads, which lie side by side. Those of a cluster are
  // neighbours.
  const bool is_cluster = params.is_cluster;
  const std::int32_t split = is_cluster ? place[0] : place[2], key_head = is_cluster ? place[2] : place[1];
  const std::int32_t first = (is_cluster ? place[1] : place[0]) * kDecodeRows;
  const auto batch = static_cast<std::int32_t>(index);
  // Each part by threads of its own, as all wait for the slowest.
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kDecodeRows) {
    const std::uint32_t pair = static_cast<std::uint32_t>(first + thread), row = params.by_group.quotient(pair);
    block.rows[thread] = static_cast<std::int32_t>(row);
    block.heads[thread] = key_head * params.group + static_cast<std::int32_t>(pair - row * params.by_group.value());
  }
  if (thread == kDecodeRows) {
    // Heads of a group read the same entry, where there is a mask by bytes: that of their key head, or of all heads.
    const BroadcastView& mask = params.mask;
    const std::int64_t entry = mask.head_divisor <= params.group ? key_head : 0;
    block.mask = params.by_bytes && mask.defined() ? static_cast<const std::uint8_t*>(mask.data) +
                                                         batch * mask.batch_stride + entry * mask.head_stride
                                                   : nullptr;
  }
  wait_for_kernels_before();
  if (thread == 32) {
    block.batch = batch, block.key_head = key_head, block.split = split, block.first = first;
    block.count = min(params.rows * params.group - first, kDecodeRows);
    block.existing = key_count(params.visibility, batch);
    // Equal shares of the keys that exist.
    const std::int32_t share = has_lists ? block.existing : decode_split_keys(block.existing, params.by_splits);
    const std::int64_t begin = has_lists ? 0 : std::int64_t{share} * split;
    block.begin = static_cast<std::int32_t>(min(begin, std::int64_t{block.existing}));
    block.end = block.begin + min(share, block.existing - block.begin);
  }
  __syncthreads();
}

}  // namespace flash_dmattn::internal::cuda
