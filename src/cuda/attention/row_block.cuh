// What is common to kernels in which a block owns rows of one query head, and each of its warps kWarpRows of them.
#pragma once

#include <cstdint>

#include "cuda/attention/fragments.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/tokens.cuh"
#include "cuda/plan/visibility.cuh"

namespace flash_dmattn::internal::cuda {

// What is the same for the whole block lies in shared memory: registers are short.
struct RowBlock {
  int batch, head, first_row, existing;
  int chunk;               // in a plan: of the block's rows
  TokenRows keys, values;  // of the block's key head, from token 0 on

  __device__ void set(const AttentionParams& params, bool planned, int own_batch, int own_head, int own_first_row) {
    batch = own_batch, head = own_head, first_row = own_first_row;
    existing = key_count(params.visibility, batch);
    chunk = planned ? static_cast<int>(params.plan.first_chunk(batch, head)) + first_row / kChunkRows : 0;
    keys = rows_of(params.key, batch, head / params.group, 0);
    values = rows_of(params.value, batch, head / params.group, 0);
  }
};

// Of the thread's part of the scores.
template <int kWarpRows>
struct RowBlockOrigin : FragmentOrigin {
  __device__ explicit RowBlockOrigin(int thread)
      : FragmentOrigin{thread / 32 * kWarpRows + thread % 32 / 4, 2 * (thread % 4)} {}
};

}  // namespace flash_dmattn::internal::cuda
