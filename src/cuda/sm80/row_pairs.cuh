// Copies of rows of two tensors at once: of keys and values, or of queries and gradients of the output.
#pragma once

#include "cuda/attention/shared_tile.cuh"
#include "cuda/attention/tokens.cuh"

namespace flash_dmattn::internal::cuda {

// As load_rows (tokens.cuh), for tiles that may differ in width.
template <int kRows, int kThreads, int kFirstColumns, int kSecondColumns, typename IndexOf>
__device__ inline void load_row_pairs(int thread, SharedTile<kFirstColumns> first, SharedTile<kSecondColumns> second,
                                      const TokenRows (&sources)[2], IndexOf index_of, const int (&columns)[2],
                                      bool aligned) {
  if constexpr (kFirstColumns == kSecondColumns) {
    const SharedTile<kFirstColumns> tiles[] = {first, second};
    load_rows<kRows, kFirstColumns, kThreads>(thread, tiles, sources, index_of, columns, aligned);
  } else {
    const SharedTile<kFirstColumns> first_tiles[] = {first};
    const SharedTile<kSecondColumns> second_tiles[] = {second};
    const TokenRows first_sources[] = {sources[0]}, second_sources[] = {sources[1]};
    load_rows<kRows, kFirstColumns, kThreads>(thread, first_tiles, first_sources, index_of, {columns[0]}, aligned);
    load_rows<kRows, kSecondColumns, kThreads>(thread, second_tiles, second_sources, index_of, {columns[1]}, aligned);
  }
}

}  // namespace flash_dmattn::internal::cuda
