// What the producers of two blocks of the sm90 backward that share works (BackwardBlock::kPaired) hand to one another:
// which work comes next, and keys, of which each block multiplies some columns of the other's (pair_backward.cuh).
#pragma once

#include <cstdint>

#include "cuda/attention/key_block.cuh"
#include "cuda/attention/params.h"
#include "cuda/attention/tokens.cuh"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/copy.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/sm90/gathered_rows.cuh"
#include "cuda/sm90/warps.h"

namespace flash_dmattn::internal::cuda::sm90 {

template <typename Block>
struct PairProducer : Block {
  static constexpr std::uint32_t kKeyPanel = Block::kKeyPanel;
  using Block::Block;
  using Block::params, Block::maps, Block::shared, Block::other_keys;
  using Block::rank, Block::in_other_block;

  // The first block looks for the works of both. It does not write a place before the second one has read those that
  // were there, its own keys among them (bring_other_keys).
  __device__ void hand_place_on(std::uint32_t taken, int place, int lane) const {
    if (lane == 0) {
      wait(shared_address(&shared.pair.place_empty[taken % 2]), (taken / 2 % 2) ^ 1);
      store_in_block(in_other_block(shared_address(&shared.pair.place[taken % 2])), place,
                     in_other_block(shared_address(&shared.pair.place_full[taken % 2])));
    }
    __syncwarp();
  }
  __device__ int place_of_pair(std::uint32_t taken, int lane) const {
    const std::uint32_t full = shared_address(&shared.pair.place_full[taken % 2]);
    if (lane == 0) arrive_expecting(full, sizeof(shared.pair.place[0]));
    __syncwarp();
    wait(full, taken / 2 % 2);
    return static_cast<int>(load_shared(shared_address(&shared.pair.place[taken % 2])));
  }
  // A lane's key, -1 if nobody sees it. Before it comes to the work after next, the other block has read it: the first
  // one as it hands on no place of that before its consumers are done with this work, the second one as it says so.
  __device__ void hand_key_on(std::int32_t key, int warp, int lane) const {
    const std::uint32_t place = shared.taken[warp] % 2, full = shared_address(&shared.pair.keys_full[place]);
    // As many come from the other block.
    if (warp == 0 && lane == 0) arrive_expecting(full, sizeof(shared.pair.keys[place]));
    store_in_block(in_other_block(shared_address(&shared.pair.keys[place][warp * kWarpKeys + lane])), key,
                   in_other_block(full));
  }
  __device__ std::int32_t key_of_other_block(int warp, int lane) const {
    const std::uint32_t taken = shared.taken[warp], place = taken % 2;
    wait(shared_address(&shared.pair.keys_full[place]), taken / 2 % 2);
    const std::uint32_t key = load_shared(shared_address(&shared.pair.keys[place][warp * kWarpKeys + lane]));
    __syncwarp();
    if (rank() != 0 && lane == 0) arrive_in_block(in_other_block(shared_address(&shared.pair.place_empty[place])));
    return static_cast<std::int32_t>(key);
  }

  // Of the other block's keys the panels that this one's consumers multiply. Bytes of boxes are expected at the barrier
  // that this block's own keys arrive at, and its threads arrive there once their copies have.
  __device__ void bring_other_keys(const KeyBlock& block, int warp, int lane) const {
    const std::int32_t key = key_of_other_block(warp, lane);
    const std::uint32_t target = other_keys + warp * kWarpKeys * 128;
    if (maps.boxes_of_keys && !block.listed && __all_sync(~0u, key >= 0)) {
      const std::uint32_t full = shared_address(&shared.keys.full[0]);
      if (lane == 0) {
        expect_bytes(full, 2 * kWarpKeys * 128);
        load_box(target, maps.key, rank() * 64, key, block.key_head, block.batch, full);
        load_box(target + kKeyPanel, maps.key, 128, key, block.key_head, block.batch, full);
      }
      __syncwarp();
      return;
    }
    const TokenRows rows = rows_of(params.key, block.batch, block.key_head, 0);
    for_each_gathered_row(lane, key, [&](std::int32_t source, int first_column, std::uint32_t offset) {
#pragma unroll
      for (int panel = 0; panel < 2; ++panel) {
        const int column = (panel == 0 ? rank() : 2) * 64 + first_column;
        copy_async_16(target + panel * kKeyPanel + offset, rows.row(source) + column,
                      source >= 0 && column < params.head_dim);
      }
    });
  }
};

}  // namespace flash_dmattn::internal::cuda::sm90
