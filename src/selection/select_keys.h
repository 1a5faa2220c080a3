// Dynamic selection on the host: one pass over the keys with a heap of the live ones.
#pragma once

#include <cstddef>

#include "core/problem.h"
#include "flash_dmattn/executor.h"

namespace flash_dmattn::internal {

std::size_t selection_workspace(const SelectionProblem&, const Executor&);
void select_on_host(const SelectionProblem&, void* workspace, Executor&);

}  // namespace flash_dmattn::internal
