// The intervals that say the same as a dense mask, if there are any.
#pragma once

#include "core/problem.h"
#include "flash_dmattn/executor.h"

namespace flash_dmattn::internal {

// False as soon as the rows of some key turn out not to follow one another.
bool find_intervals(const MaskIntervalsProblem&, Executor&);

}  // namespace flash_dmattn::internal
