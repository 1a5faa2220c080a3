// Which rows a warp of the sm90 backward copies one by one, and where to.
#pragma once

#include <cstdint>

namespace flash_dmattn::internal::cuda::sm90 {

// Of 32 rows, whose indices the lanes know: eight lanes take eight rows, 16 bytes of every panel of a row each. Calls
// visit(index, column, offset) for each of the lane's rows: from which column of a panel on it copies, and how far into
// a panel of shared memory.
template <typename Visit>
__device__ inline void for_each_gathered_row(int lane, std::int32_t index, Visit visit) {
  const int first_row = lane / 8 * 8, piece = lane % 8;
#pragma unroll 1
  for (int row = 0; row < 8; ++row) {
    const std::int32_t source = __shfl_sync(~0u, index, first_row + row);
    visit(source, piece * 8, static_cast<std::uint32_t>((first_row + row) * 128 + (piece ^ row) * 16));
  }
}

}  // namespace flash_dmattn::internal::cuda::sm90
