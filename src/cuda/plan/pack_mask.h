// Packs a bool mask that differs by row into bits: one pass over the mask at the speed of memory, after which planning
// and kernels read an eighth of it, with the rows of a key side by side.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/plan/visibility.h"

namespace flash_dmattn::internal::cuda {

// The same entries with every dimension of stride 0 taken for what it is, one entry: an expanded view is then as small
// as what it was expanded from.
constexpr BroadcastView without_copies(BroadcastView view) {
  const auto reduce = [](std::int64_t& size, std::int64_t& stride) {
    if (size == 1 || stride == 0) size = 1, stride = 0;
  };
  reduce(view.batches, view.batch_stride);
  reduce(view.heads, view.head_stride);
  reduce(view.rows, view.row_stride);
  reduce(view.keys, view.key_stride);
  return view;
}

// Bytes of memory that pack_mask fills, for a problem of `rows` query rows and `keys` keys: keys * rows / 8 and a
// little for every distinct (batch, head). The view may have copies in it or not.
std::size_t packed_mask_bytes(const BroadcastView& mask, std::int64_t rows, std::int64_t keys);

// What pack_mask wrote, or is going to write, into `memory`; all pointers are null if that is null.
PackedMask packed_mask_at(const BroadcastView& mask, std::int64_t rows, std::int64_t keys, void* memory);

// Packs a (batches, heads, rows, keys) bool mask of any strides into `memory` (aligned to 64 bytes) and describes the
// result in `packed`. Any nonzero byte is true. A mask that is the same for every row is packed too, but is better
// passed on as a key mask. Returns launch errors only; enqueues one kernel and never waits.
cudaError_t pack_mask(const BroadcastView& mask, std::int64_t rows, std::int64_t keys, void* memory, PackedMask* packed,
                      cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
