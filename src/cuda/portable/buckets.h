// From a head dim known at run time to a bucket known at compile time.
#pragma once

#include "cuda/portable/launch.h"

namespace flash_dmattn::internal::cuda {

// Calls call.operator()<bucket>().
template <typename Call>
auto with_bucket(std::int64_t head_dim, Call call) {
  switch (bucket_of(static_cast<int>(head_dim))) {
    case 32:
      return call.template operator()<32>();
    case 64:
      return call.template operator()<64>();
    case 96:
      return call.template operator()<96>();
    case 128:
      return call.template operator()<128>();
    case 192:
      return call.template operator()<192>();
    default:
      return call.template operator()<256>();
  }
}

}  // namespace flash_dmattn::internal::cuda
