// The sm90 backward for one element type and pair of buckets, of keys and of values: cmake/cuda.cmake compiles this
// file once for each.
#include <algorithm>

#include "cuda/launch_blocks.cuh"
#include "cuda/sm90/backward.cuh"
#include "cuda/sm90/launch.h"

namespace flash_dmattn::internal::cuda::sm90 {
namespace {

template <typename Element, int kHeadDim, int kValueDim, bool kPlanned, std::uint32_t kAbsent>
cudaError_t launch_backward_kernel(const BackwardParams& params, const BackwardMaps& maps, cudaStream_t stream) {
  using Block = BackwardBlock<Element, kHeadDim, kValueDim, kPlanned, kAbsent>;
  using Config = typename Block::Config;
  constexpr int kWorkKeys = Block::kWorkKeys;
  const std::int64_t works = kPlanned ? key_blocks<kWorkKeys, true>(params)
                                      : unplanned_works<kWorkKeys>(params, params.batch * params.key_heads);
  // After the pass over rows, which lets it begin.
  const LaunchShape shape = {
      .blocks = std::min<std::int64_t>(works, params.processors / Block::kBlocks) * Block::kBlocks,
      .threads = Config::kThreads,
      .shared_bytes = Block::kSharedBytes,
      .is_dependent = true,
      .cluster_blocks = Block::kBlocks};
  if constexpr (Block::kStoresQueries) {
    // The device knows whether dquery is stored: one of the twins finds that it has no works.
    constexpr std::uint32_t kNoneStored = kAbsent | Block::Facts::kMetOnce;
    const cudaError_t result = launch_blocks(backward_kernel<Element, kHeadDim, kValueDim, kPlanned, kNoneStored>,
                                             shape, stream, params, maps);
    if (result != cudaSuccess || params.met_once.tiles == nullptr) return result;
  }
  return launch_blocks(backward_kernel<Element, kHeadDim, kValueDim, kPlanned, kAbsent>, shape, stream, params, maps);
}

}  // namespace

template <typename Element, int kHeadDim, int kValueDim>
cudaError_t launch_backward(const BackwardParams& params, const BackwardMaps& maps, bool planned, cudaStream_t stream) {
  // What is absent from each of three kinds of kernels; the first has everything but a bias that differs by row.
  using Facts = StepFacts<BackwardConfig<kHeadDim, kValueDim>>;
  constexpr std::uint32_t kNoRowBias = Facts::kRowBiased | Facts::kStoresRowBias,
                          kNoTurns = kNoRowBias | Facts::kTakesTurns,
                          kPlain = kNoTurns | Facts::kTransforms | Facts::kBiased | Facts::kSumsKeyBias;
  const std::uint32_t marks = Facts::marks_of(params);
  const auto launch = [&]<bool kPlanned>() {
    if ((marks & kPlain) == 0)
      return launch_backward_kernel<Element, kHeadDim, kValueDim, kPlanned, kPlain>(params, maps, stream);
    return (marks & Facts::kTakesTurns) == 0
               ? launch_backward_kernel<Element, kHeadDim, kValueDim, kPlanned, kNoTurns>(params, maps, stream)
               : launch_backward_kernel<Element, kHeadDim, kValueDim, kPlanned, kNoRowBias>(params, maps, stream);
  };
  // Of a kind of its own, without a plan or turns.
  if (params.bias.defined() && params.bias.rows > 1) {
    if constexpr (has_row_biased_backward(kHeadDim)) {
      constexpr std::uint32_t kRowBiased = Facts::kTakesTurns | Facts::kBiased | Facts::kSumsKeyBias;
      return launch_backward_kernel<Element, kHeadDim, kValueDim, false, kRowBiased>(params, maps, stream);
    } else {
      return cudaErrorInvalidValue;  // takes_backward declines
    }
  }
  return planned ? launch.template operator()<true>() : launch.template operator()<false>();
}

template cudaError_t launch_backward<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_VALUE_DIM>(
    const BackwardParams&, const BackwardMaps&, bool, cudaStream_t);

}  // namespace flash_dmattn::internal::cuda::sm90
