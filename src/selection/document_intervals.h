// Packed documents as intervals, on the host.
#pragma once

#include "core/problem.h"

namespace flash_dmattn::internal {

void write_document_intervals(const DocumentIntervalsProblem&);

}  // namespace flash_dmattn::internal
