// What backends share of the lines that FLASH_DMATTN_LOG=1 asks for.
#pragma once

#include <string>

#include "core/problem.h"

namespace flash_dmattn::internal {

// Whether FLASH_DMATTN_LOG is set to something other than 0.
bool logging();

// "bfloat16 forward B1 H8 Hkv2 Sq1024 Sk1024 D64 causal bias"
std::string describe_call(const char* direction, const AttentionProblem&);

}  // namespace flash_dmattn::internal
