// Packs lists of keys per query row (KeyIndices) into the bits that pack_mask makes of a mask, after which planning and
// kernels know no difference: time in proportion to the lists and to rows * keys / 8 bytes, which are written once.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "cuda/plan/visibility.h"

namespace flash_dmattn::internal::cuda {

// Bytes of memory that pack_indices fills, for a problem of `rows` query rows and `keys` keys: as packed_mask_bytes of
// a mask with an entry for every row and key, and the finer batch elements and heads of lists and lengths.
std::size_t packed_indices_bytes(const IndexViews& indices, std::int64_t rows, std::int64_t keys);

// What pack_indices wrote, or is going to write, into `memory`; all pointers are null if that is null.
PackedMask packed_indices_at(const IndexViews& indices, std::int64_t rows, std::int64_t keys, void* memory);

// Packs the lists into `memory` (aligned to 64 bytes) and describes the result in `packed`: bit by bit what pack_mask
// makes of the mask that says the same. `is_causal`: the causal rule holds beside the lists, so that what it hides may
// or may not be among the bits. `shared_limit`: bytes of shared memory that a block may have. Returns launch errors
// only; enqueues a clearing and one kernel and never waits.
cudaError_t pack_indices(const IndexViews& indices, std::int64_t rows, std::int64_t keys, bool is_causal,
                         std::size_t shared_limit, void* memory, PackedMask* packed, cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
