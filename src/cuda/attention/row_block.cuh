// What kernels share in which a block owns rows of one query head, and each of its warps kWarpRows of them.
#pragma once

#include <cstdint>

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

// Which scores are a thread's: pairs of neighbouring columns.
template <int kWarpRows>
struct RowPlace {
  int row, column;  // the first

  __device__ explicit RowPlace(int thread) {
    row = thread / 32 * kWarpRows + thread % 32 / 4;
    column = 2 * (thread % 4);
  }
  __device__ int row_of(int i) const { return row + i * 8; }
  __device__ int column_of(int n) const { return column + n * 8; }
};

}  // namespace flash_dmattn::internal::cuda
