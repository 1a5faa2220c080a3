// Host launchers of the sm90 kernels. Every one returns the launch's error.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "cuda/attention/params.h"
#include "cuda/sm90/forward_config.h"

namespace flash_dmattn::internal::cuda::sm90 {

// What a forward reads and writes, as the copy engine finds it: boxes of a consumer's rows, and of a tile of keys or,
// in a plan, of those of a producer's warp.
struct ForwardMaps {
  CUtensorMap query, key, value;
  CUtensorMap out;   // if rows are aligned: boxes of a warp's rows
  CUtensorMap bias;  // if it differs by row: boxes of a work tile's rows, and of 64 keys
};

struct Sm90ForwardParams : ForwardParams {
  // In a plan: a block's two consumers own the same rows of two neighbouring heads, which see the same, instead of
  // neighbouring rows of one.
  bool pairs_heads = false;
  bool boxes_of_bias = false;         // the bias differs by row, and ForwardMaps has it
  std::int32_t works = 0;             // work tiles of the launch, which its blocks share
  std::int32_t* next_huge = nullptr;  // scratch of so many (work_queue.cuh)
};

// Calls function<kPlanned, kScoring>() of the kernel for the call.
template <int kHeadDim, int kValueDim, typename Function>
auto by_kernel(const Sm90ForwardParams& params, bool planned, Function function) {
  const bool row_biased = params.bias.defined() && params.bias.rows > 1;
  if constexpr (kHeadDim <= kMostAnyHeadDim && kValueDim <= kMostAnyHeadDim) {
    if (params.score.softcap != 0 || (row_biased && !params.boxes_of_bias)) {
      return planned ? function.template operator()<true, Scoring::kAny>()
                     : function.template operator()<false, Scoring::kAny>();
    }
  }
  if (planned) {
    return params.score.transforms ? function.template operator()<true, Scoring::kScaled>()
                                   : function.template operator()<true, Scoring::kNone>();
  }
  return row_biased                ? function.template operator()<false, Scoring::kRowBiased>()
         : params.bias.defined()   ? function.template operator()<false, Scoring::kKeyBiased>()
         : params.score.transforms ? function.template operator()<false, Scoring::kScaled>()
                                   : function.template operator()<false, Scoring::kNone>();
}

// What a backward reads in boxes, of a step's rows and of the keys of a producer's warp, and what it may store in
// boxes, of the keys of a consumer's warp, if it is wanted.
struct BackwardMaps {
  CUtensorMap query, dout;
  CUtensorMap key, value;
  CUtensorMap dkey, dvalue;
  CUtensorMap bias, dbias;  // of a bias that differs by row: boxes of a step's rows and 64 keys
  bool boxes_of_keys;       // or the strides of keys or values do not allow boxes, and all are gathered
  bool stores_dbias;        // if it is asked for
};

// One unit of compilation for each element type and pair of buckets (backward_instance.cu).
template <typename Element, int kHeadDim, int kValueDim>
cudaError_t launch_backward(const BackwardParams& params, const BackwardMaps& maps, bool planned, cudaStream_t stream);

// dquery from the sums that it left, which lie as its threads' registers do (query_gradients.cu).
cudaError_t launch_query_gradients(const BackwardProblem& problem, const BackwardParams& params, cudaStream_t stream);

// One unit of compilation for each element type and pair of buckets (forward_instance.cu).
template <typename Element, int kHeadDim, int kValueDim>
cudaError_t launch_forward(const Sm90ForwardParams& params, const ForwardMaps& maps, bool planned, cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda::sm90
