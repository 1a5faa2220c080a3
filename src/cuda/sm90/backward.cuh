// The sm90 backward: a block owns a tile of keys and walks over the tiles of query rows that see it, for some query
// heads of a group, as that of sm80 does (sm80/backward.cuh has the formulas).
//
// Scores are computed transposed, a key a row: S^T = K Q^T and dP^T = V dO^T. Probabilities and gradients of scores are
// then, where the tensor cores have left them, in registers, the operands of dV += P^T dO and dK += dS^T Q. Only dS
// goes through shared memory, as dQ = dS K adds over the keys of all consumers; of wide heads P, too. Producers
// (backward_producer.cuh) bring queries and output gradients, and what is known of them, step by step; consumers
// compute: each all gradients of its own keys (backward_consumer.cuh) or, of wide heads, one of all keys
// (split_backward_consumer.cuh). A block stays for many tiles of keys, its works: producers are at the next one while
// consumers end the one before.
#pragma once

#include <cstdint>

#include "cuda/attention/params.h"
#include "cuda/ptx/dependent_launch.cuh"
#include "cuda/ptx/dynamic_shared.cuh"
#include "cuda/sm90/backward_block.cuh"
#include "cuda/sm90/backward_config.h"
#include "cuda/sm90/backward_consumer.cuh"
#include "cuda/sm90/backward_producer.cuh"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/split_backward_consumer.cuh"
#include "cuda/sm90/warps.h"

namespace flash_dmattn::internal::cuda::sm90 {

template <typename Element, int kHeadDim, int kValueDim, bool kPlanned, std::uint32_t kAbsent>
__global__ void __launch_bounds__(BackwardConfig<kHeadDim, kValueDim>::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardParams params, const __grid_constant__ BackwardMaps maps) {
  using Block = BackwardBlock<Element, kHeadDim, kValueDim, kPlanned, kAbsent>;
  using Config = typename Block::Config;
  constexpr std::uint32_t kLargeRows = Block::Facts::kLargeRows;
  unsigned char* memory = dynamic_shared_panels();
  Block block(params, maps, memory);
  begin_dependent_kernel();
  block.init();
  if (threadIdx.x < kWarpGroup) {
    give_registers_up<Config::kProducerRegisters>();
    BackwardProducer<Block>(params, maps, at_kept_address(memory)).produce();
  } else if constexpr (!Config::kSplitsGradients) {
    take_registers<Config::kConsumerRegisters>();
    if (Config::keeps_large_rows_apart(kPlanned, Block::kIsPlain) && (block.shared.marks & kLargeRows) == 0) {
      BackwardConsumer<Block, kAbsent | kLargeRows>(block).run();
    } else {
      BackwardConsumer<Block, kAbsent>(block).run();
    }
  } else if (threadIdx.x < 2 * kWarpGroup) {
    take_registers<Config::kConsumerRegisters>();
    SplitBackwardConsumer<Block, kAbsent, true>(block).run();
  } else {
    take_registers<Config::kKeyConsumerRegisters>();
    SplitBackwardConsumer<Block, kAbsent, false>(block).run();
  }
  // Until then the other block may write to this one's shared memory.
  if constexpr (Block::kPaired) sync_cluster();
}

}  // namespace flash_dmattn::internal::cuda::sm90
