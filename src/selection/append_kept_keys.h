// The best keys of a growing cache, kept up to date on the host: one scan of the kept keys for each that is replaced.
#pragma once

#include "core/problem.h"
#include "flash_dmattn/executor.h"

namespace flash_dmattn::internal {

void append_on_host(const KeptKeysProblem&, Executor&);

}  // namespace flash_dmattn::internal
