// One row's list of keys (KeyIndices), read on the device.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/plan/entry_offset.cuh"

namespace flash_dmattn::internal::cuda {

struct RowList {
  const std::int32_t* entries;
  std::int64_t count, stride;
};

__device__ inline RowList list_of_row(const IndexViews& indices, std::int64_t batch, std::int32_t head,
                                      std::int32_t row) {
  const BroadcastView &entries = indices.entries, &lengths = indices.lengths;
  std::int64_t count = entries.keys;
  if (lengths.defined()) {
    const std::int64_t length =
        static_cast<const std::int32_t*>(lengths.data)[entry_offset(lengths, batch, head) + row * lengths.row_stride];
    count = min(max(length, std::int64_t{0}), count);
  }
  if (count == 0) return {nullptr, 0, 0};  // lists without entries have no memory
  return {
      static_cast<const std::int32_t*>(entries.data) + entry_offset(entries, batch, head) + row * entries.row_stride,
      count, entries.key_stride};
}

}  // namespace flash_dmattn::internal::cuda
