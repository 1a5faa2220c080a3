// The vector helpers of one instruction set, for tests that are compiled for none in particular.
#pragma once

#include <cstdint>

namespace flash_dmattn::internal::cpu {

struct SimdProbe {
  const char* name;
  bool fused_multiply_add;
  int lanes;
  // On `lanes` values.
  void (*exponential6)(const float* from, float* to);
  void (*exponential5)(const float* from, float* to);
  void (*hyperbolic_tangent)(const float* from, float* to);
  void (*select)(std::uint64_t bits, const float* from, float* to);  // 0 where the bit is
  // On `count` values; the 16-bit floats as bits.
  void (*floats_of_fp16)(const std::uint16_t* from, std::int64_t count, float* to);
  void (*fp16_of)(const float* from, float factor, std::int64_t count, std::uint16_t* to);
  void (*bf16_of)(const float* from, float factor, std::int64_t count, std::uint16_t* to);
};

extern const SimdProbe kBaselineProbe;
#if defined(__x86_64__)
extern const SimdProbe kAvx2Probe;
extern const SimdProbe kAvx512Probe;
#endif

}  // namespace flash_dmattn::internal::cpu
