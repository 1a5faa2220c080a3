// Lists what the blocks of a backward have to do, if they stay for many tiles of keys. A grid with a block for each
// tile that a list may have would mostly be of blocks without any where rows are shown few keys, and each of these
// takes a microsecond to come and go.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/attention/params.h"

namespace flash_dmattn::internal::cuda {

// Entries of KeyWorks::starts, less the last one, of a launch that takes the lists of `chunks` chunks of rows.
constexpr std::int64_t key_work_entries(std::int64_t batch, std::int64_t key_heads, std::int64_t splits,
                                        std::int64_t chunks) {
  return batch * key_heads * splits * (1 + chunks);
}

// Where blocks wait for their turn to add (SumTurns), those that run at the same time come from several key heads by
// turns, so that few of them wait for one another: from as many as there are tracks, each of key heads that follow one
// another. At most a lane of a warp each.
constexpr int kMostKeyTracks = 32;

// Writes params.works, of a plan, for blocks of `tile_keys` keys, which may be 32, 64 or 128. If params.works.last is
// there, so many of the last works as `most_ordered`, or kMostOrderedBlocks, come longest first.
cudaError_t list_key_works(const BackwardParams& params, int tile_keys, int most_ordered, cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
