// The head dims that kernels are compiled for. A head in between is computed by the next larger one, padded with zeros
// in shared memory only; and so is the narrower one of a call's two head dims, where they differ, but for buckets that
// have kernels of their own for narrower values.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#ifdef FLASH_DMATTN_HAS_HEAD_DIMS
#include "head_dim_buckets.h"  // written by cmake/cuda.cmake
#else
#define FLASH_DMATTN_HEAD_DIMS 32, 64, 96, 128, 192, 256
#endif

namespace flash_dmattn::internal::cuda {

// In increasing order; from the CMake option of that name.
constexpr std::array kHeadDimBuckets = {FLASH_DMATTN_HEAD_DIMS};

// The smallest bucket that holds a head of `head_dim`, as one of problem.h; 0: none was compiled.
constexpr int bucket_of(std::int64_t head_dim) {
  for (const int bucket : kHeadDimBuckets) {
    if (head_dim <= bucket) return bucket;
  }
  return 0;
}

// The head dim whose bucket computes the call: the larger one of queries and keys, and of values.
template <typename Call>
constexpr std::int64_t wider_head_dim(const Call& call) {
  return call.head_dim < call.value_dim ? call.value_dim : call.head_dim;
}

// Calls call.operator()<bucket>() with the bucket of head_dim, which exists.
template <std::size_t kIndex = 0, typename Call>
auto with_bucket(std::int64_t head_dim, Call call) {
  constexpr int kBucket = kHeadDimBuckets[kIndex];
  if constexpr (kIndex + 1 < kHeadDimBuckets.size()) {
    if (head_dim > kBucket) return with_bucket<kIndex + 1>(head_dim, call);
  }
  return call.template operator()<kBucket>();
}

// The bucket of values up to which a bucket has kernels of their own, beside those for values as wide as itself:
// multi-head latent attention has heads of 192 and values of 128.
constexpr int narrow_value_bucket(int bucket) { return bucket == 192 ? 128 : bucket; }

// Calls call.operator()<bucket of values>() for a call whose bucket is kHeadDim.
template <int kHeadDim, typename Call>
auto with_value_bucket(std::int64_t value_dim, Call call) {
  constexpr int kNarrow = narrow_value_bucket(kHeadDim);
  if constexpr (kNarrow < kHeadDim) {
    if (value_dim <= kNarrow) return call.template operator()<kNarrow>();
  }
  return call.template operator()<kHeadDim>();
}

}  // namespace flash_dmattn::internal::cuda
