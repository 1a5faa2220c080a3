// What this build of the library is and what it chose on this machine.
#pragma once

#include <string>
#include <vector>

namespace flash_dmattn {

struct CpuInfo {
  // Instruction set that runs each dtype's kernels: "avx512", "avx2", "neon", "baseline", for bfloat16
  // also "amx" and "avx512_bf16".
  std::string isa_float;               // float32 and float16
  std::string isa_bfloat16;            // bfloat16
  std::vector<std::string> compiled;   // every kernel set in this build
  std::vector<std::string> supported;  // those that this CPU can run
};

const char* version();  // "2.0.0"
CpuInfo cpu_info();     // honours FLASH_DMATTN_ISA, which caps the instruction set (for tests and comparisons)

}  // namespace flash_dmattn
