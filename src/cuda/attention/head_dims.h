// The head dims that kernels are compiled for. A head in between is computed by the next larger one, padded with zeros
// in shared memory only; and so is the narrower one of a call's two head dims, where they differ.
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

}  // namespace flash_dmattn::internal::cuda
