// What surrounds the kernels of every backward, whichever family they are of, beside the first pass (row_facts.h):
// sums are cleared before them and rounded to gradients after them. Every launcher returns the launch's error.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/attention/params.h"

namespace flash_dmattn::internal::cuda {

// Where gradients of keys are added up. Of what rows of a long sequence choose by themselves most keys are seen by
// none: with the top w of random scores all but w (1 + log(Sk / w)) of Sk. Sums of those that are seen are marked;
// others are neither cleared nor read.
struct KeyGradientSums {
  float *dkey = nullptr, *dvalue = nullptr;  // (colors, B, Sk, Hkv, columns) fp32; null: not wanted
  int key_columns = 0, value_columns = 0;    // the latter are no more
  int colors = 1;
  int tile_keys = 1;               // a block of the backward owns so many keys, and adds up what it has of all of them
  std::uint8_t* marks = nullptr;   // (B or 1, Hkv / mark_heads, Sk), 1: the key has sums; null: all do
  bool marks_per_batch = true;     // those of all batch elements are the same otherwise
  std::int32_t mark_heads = 1;     // so many neighbouring key heads have the same
  std::uint8_t* stored = nullptr;  // (B, Hkv), 1: nothing is added up, gradients are there already; null: of no head

  // How many rows of marks there are.
  constexpr std::int64_t mark_rows(std::int64_t batches, std::int64_t key_heads) const {
    return (marks_per_batch ? batches : 1) * (key_heads / mark_heads);
  }
};

// How key heads share marks whose query heads have the same plan.
void share_marks(const BackwardProblem& problem, const DevicePlan& plan, KeyGradientSums* sums);

// Marks the keys of the plan's chunks, lists and tiles of ranges; marks were 0. `stored`, if there is one, is told of
// heads for which no chunk of the plan has a list. Finds tiles of rows that are met once, if these are wanted.
cudaError_t launch_mark_keys(const BackwardProblem& problem, const DevicePlan& plan, const KeyGradientSums& sums,
                             const MetOnceTiles& met_once, cudaStream_t stream);
// Clears the sums of marked keys, of heads that are not stored. Lets the next kernel begin. `beside`: so does the one
// before it, which began when keys were marked.
cudaError_t launch_clear_key_sums(const BackwardProblem& problem, const KeyGradientSums& sums, bool beside,
                                  cudaStream_t stream);

// Of the passes at the end each may run beside the one before it: `beside`.
// dkey and dvalue from their sums.
cudaError_t launch_key_gradients(const BackwardProblem& problem, const KeyGradientSums& sums, bool beside,
                                 cudaStream_t stream);
// dbias from fp32 sums of its shape.
cudaError_t launch_bias_gradients(const float* sums, std::int64_t count, DType dtype, void* gradient, bool beside,
                                  cudaStream_t stream);
// dbias, the same for every row, from fp32 sums (colors, B, H, Sk), each by one thread in one order.
cudaError_t launch_reduced_bias_gradients(const BackwardProblem& problem, const float* sums, int colors, bool beside,
                                          cudaStream_t stream);

}  // namespace flash_dmattn::internal::cuda
