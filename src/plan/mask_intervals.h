// The intervals that say the same as a dense mask, if there are any.
#pragma once

#include <cstdint>

#include "flash_dmattn/executor.h"

namespace flash_dmattn::internal {

struct MaskIntervalsProblem {
  std::int64_t batch = 0, heads = 0, rows = 0, keys = 0;
  bool is_causal = false;
  const std::uint8_t* mask = nullptr;
  std::int64_t strides[4] = {};                   // batch, head, row, key
  std::int32_t *begin = nullptr, *end = nullptr;  // contiguous (batch, heads, keys)
};

// False as soon as the rows of some key turn out not to follow one another.
bool find_intervals(const MaskIntervalsProblem&, Executor&);

}  // namespace flash_dmattn::internal
