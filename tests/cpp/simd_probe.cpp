// Compiled once per instruction set, with SIMD_PROBE as the name of what it defines.
#include "simd_probe.h"

#include "cpu/simd-inl.h"

namespace flash_dmattn::internal::cpu {
namespace {

template <Vec (*kFunction)(Vec)>
void map_lanes(const float* from, float* to) {
  hn::StoreU(kFunction(hn::LoadU(kFloats, from)), kFloats, to);
}

Vec exponential6(Vec x) { return exponential<6>(x); }
Vec exponential5(Vec x) { return exponential<5>(x); }
Vec tangent(Vec x) { return hyperbolic_tangent(x); }

void select(std::uint64_t bits, const float* from, float* to) {
  hn::StoreU(hn::IfThenElseZero(mask_from_bits(bits), hn::LoadU(kFloats, from)), kFloats, to);
}

void floats_of_fp16(const std::uint16_t* from, std::int64_t count, float* to) {
  convert_row(reinterpret_cast<const Fp16*>(from), count, to);
}
void fp16_of(const float* from, float factor, std::int64_t count, std::uint16_t* to) {
  store_row(from, factor, count, reinterpret_cast<Fp16*>(to));
}
void bf16_of(const float* from, float factor, std::int64_t count, std::uint16_t* to) {
  store_row(from, factor, count, reinterpret_cast<Bf16*>(to));
}

}  // namespace

#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
constexpr bool kFused = true;
#else
constexpr bool kFused = false;
#endif

extern const SimdProbe SIMD_PROBE = {hwy::TargetName(HWY_TARGET),
                                     kFused,
                                     kLanes,
                                     map_lanes<exponential6>,
                                     map_lanes<exponential5>,
                                     map_lanes<tangent>,
                                     select,
                                     floats_of_fp16,
                                     fp16_of,
                                     bf16_of};

}  // namespace flash_dmattn::internal::cpu
