// What this build of the library is and what it chose on this machine.
#pragma once

#include <string>
#include <vector>

#include "flash_dmattn/export.h"

namespace FLASH_DMATTN_API flash_dmattn {

// The CPU's kernels: those of this build, those that this machine can run, those that were chosen.
struct CpuInfo {
  // Instruction set that runs each dtype's kernels: "avx512", "avx2", "neon", "baseline", for bfloat16
  // also "amx" and "avx512_bf16".
  std::string isa_float;               // float32 and float16
  std::string isa_bfloat16;            // bfloat16
  std::vector<std::string> compiled;   // every kernel set in this build
  std::vector<std::string> supported;  // those that this CPU can run
};

// What of CUDA is in this build.
struct CudaInfo {
  int toolkit = 0;                         // CUDA version that it was compiled with: 13000 is 13.0; 0: without CUDA
  std::vector<std::string> architectures;  // "90-real": machine code; "80-virtual": PTX, for all GPUs from there on
};

// These do not fail, and may be called at any time.
const char* version();  // "2.0.0"
CpuInfo cpu_info();     // honours FLASH_DMATTN_ISA, which caps the instruction set (for tests and comparisons)
CudaInfo cuda_info();   // touches neither driver nor GPU

// The newest family of kernels that runs on GPUs of this compute capability: "sm90", "sm80", which all of them run, or
// "none".
std::string cuda_kernels(int major, int minor);

}  // namespace FLASH_DMATTN_API flash_dmattn
