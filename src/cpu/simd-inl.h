// Vector helpers on Highway. Included by one file per instruction set; everything here has internal
// linkage, so that no function compiled for a newer CPU can be picked by the linker for an older one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "hwy/highway.h"

namespace flash_dmattn::internal::cpu {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::ScalableTag<float>;
using Vec = hn::Vec<FloatTag>;
using Mask = hn::Mask<FloatTag>;

constexpr FloatTag kFloats;
constexpr int kLanes = HWY_LANES(float);
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Storage of 16-bit floats. bfloat16 is the upper half of a float.
struct Bf16 {
  std::uint16_t bits;
};
struct Fp16 {
  std::uint16_t bits;
};

HWY_INLINE Vec load_floats(const float* from) { return hn::LoadU(kFloats, from); }
HWY_INLINE Vec load_floats(const Bf16* from) {
  const hn::Rebind<std::uint16_t, FloatTag> halves;
  const hn::Rebind<std::uint32_t, FloatTag> words;
  const auto bits = hn::LoadU(halves, &from->bits);
  return hn::BitCast(kFloats, hn::ShiftLeft<16>(hn::PromoteTo(words, bits)));
}

// Highway's conversions of half precision are those of the CPU on these; elsewhere its portable ones truncate
// and lose infinities.
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
HWY_INLINE Vec load_floats(const Fp16* from) {
  const hn::Rebind<hwy::float16_t, FloatTag> halves;
  return hn::PromoteTo(kFloats, hn::LoadU(halves, reinterpret_cast<const hwy::float16_t*>(from)));
}
HWY_INLINE void store_floats(Vec v, Fp16* to) {
  const hn::Rebind<hwy::float16_t, FloatTag> halves;
  hn::StoreU(hn::DemoteTo(halves, v), halves, reinterpret_cast<hwy::float16_t*>(to));
}
#else
HWY_INLINE Vec load_floats(const Fp16* from) {
  const hn::Rebind<std::uint16_t, FloatTag> halves;
  const hn::RebindToUnsigned<FloatTag> words;
  const auto bits = hn::PromoteTo(words, hn::LoadU(halves, &from->bits));
  const auto magnitude = hn::And(bits, hn::Set(words, 0x7fff));
  const auto sign = hn::ShiftLeft<16>(hn::Xor(bits, magnitude));
  // Exponent and fraction at their places, the exponent too low by 112: a product corrects it, and makes
  // subnormal numbers normal.
  const Vec shifted = hn::BitCast(kFloats, hn::ShiftLeft<13>(magnitude));
  const auto value = hn::BitCast(words, hn::Mul(shifted, hn::Set(kFloats, 0x1p112f)));
  const auto is_special = hn::Gt(magnitude, hn::Set(words, 0x7bff));  // infinity or NaN
  const auto special = hn::IfThenElseZero(is_special, hn::Set(words, 0x7f800000));
  return hn::BitCast(kFloats, hn::Or(hn::Or(value, special), sign));
}
HWY_INLINE void store_floats(Vec v, Fp16* to) {
  const hn::Rebind<std::uint16_t, FloatTag> halves;
  const hn::RebindToUnsigned<FloatTag> words;
  const hn::RebindToSigned<FloatTag> integers;
  const auto bits = hn::BitCast(words, v);
  const auto magnitude = hn::And(bits, hn::Set(words, 0x7fffffff));
  const auto sign = hn::ShiftRight<16>(hn::Xor(bits, magnitude));
  // Normal results: add just below half of what is cut off, or exactly half where the kept part is odd.
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(words, 1));
  const auto rebased = hn::Sub(hn::Add(hn::Add(magnitude, odd), hn::Set(words, 0xfff)), hn::Set(words, 112u << 23));
  // Subnormal results: adding 1/2 rounds at their last place.
  const Vec half = hn::Set(kFloats, 0.5f);
  const auto subnormal =
      hn::Sub(hn::BitCast(words, hn::Add(hn::BitCast(kFloats, magnitude), half)), hn::BitCast(words, half));
  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(words, 113u << 23)), subnormal, hn::ShiftRight<13>(rebased));
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(words, 0x477fefff)), hn::Set(words, 0x7c00), result);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(words, 0x7f800000)), hn::Set(words, 0x7e00), result);
  // The values fit 16 bits, so the saturating conversion is exact.
  hn::StoreU(hn::DemoteTo(halves, hn::BitCast(integers, hn::Or(result, sign))), halves, &to->bits);
}
#endif

// Round to nearest even; NaN stays NaN.
HWY_INLINE auto bf16_bits(Vec v) {
  const hn::RebindToUnsigned<FloatTag> words;
  const auto bits = hn::BitCast(words, v);
  const auto lowest_kept = hn::And(hn::ShiftRight<16>(bits), hn::Set(words, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(lowest_kept, hn::Set(words, 0x7fff))));
  const auto quiet_nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(words, 0x40));
  return hn::IfThenElse(hn::RebindMask(words, hn::IsNaN(v)), quiet_nan, rounded);
}

HWY_INLINE void store_floats(Vec v, float* to) { hn::StoreU(v, kFloats, to); }
HWY_INLINE void store_floats(Vec v, Bf16* to) {
  const hn::Rebind<std::uint16_t, FloatTag> halves;
  const hn::RebindToSigned<FloatTag> words;
  // The values fit 16 bits, so the saturating conversion is exact.
  hn::StoreU(hn::DemoteTo(halves, hn::BitCast(words, bf16_bits(v))), halves, &to->bits);
}
// The first `count` of kLanes elements, and zeros. What follows them is not read: it may belong to nobody.
template <typename T>
HWY_INLINE Vec load_first(const T* from, std::int64_t count) {
#if HWY_TARGET == HWY_AVX3
  if constexpr (sizeof(T) == sizeof(float)) {
    return hn::MaskedLoad(hn::FirstN(kFloats, static_cast<std::size_t>(count)), kFloats, from);
  }
#endif
  T padded[kLanes] = {};
  std::memcpy(padded, from, static_cast<std::size_t>(count) * sizeof(T));
  return load_floats(padded);
}

// `count` elements from `from` to floats at `to`; reads and writes nothing beyond them.
template <typename T>
HWY_INLINE void convert_row(const T* HWY_RESTRICT from, std::int64_t count, float* HWY_RESTRICT to) {
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) hn::StoreU(load_floats(from + i), kFloats, to + i);
  if (i < count) {
    float floats[kLanes];
    hn::StoreU(load_first(from + i, count - i), kFloats, floats);
    std::memcpy(to + i, floats, static_cast<std::size_t>(count - i) * sizeof(float));
  }
}

// to[i] = from[i] * factor, rounded to T.
template <typename T>
HWY_INLINE void store_row(const float* HWY_RESTRICT from, float factor, std::int64_t count, T* HWY_RESTRICT to) {
  const Vec factors = hn::Set(kFloats, factor);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_floats(hn::Mul(hn::LoadU(kFloats, from + i), factors), to + i);
  if (i < count) {
    float padded[kLanes] = {};
    T converted[kLanes];
    std::memcpy(padded, from + i, static_cast<std::size_t>(count - i) * sizeof(float));
    store_floats(hn::Mul(hn::LoadU(kFloats, padded), factors), converted);
    std::memcpy(to + i, converted, static_cast<std::size_t>(count - i) * sizeof(T));
  }
}

// Elements of a cache line.
template <typename T>
constexpr int kLineElements = 64 / sizeof(T);

// Has the cache lines of `count` elements fetched: into the L1 cache (kLocality 3) or the L2 cache (2), to be read or
// written (kWrite 1).
template <int kWrite = 0, int kLocality = 3, typename T>
HWY_INLINE void prefetch_row(const T* row, std::int64_t count) {
  for (std::int64_t i = 0; i < count; i += kLineElements<T>) __builtin_prefetch(row + i, kWrite, kLocality);
}

HWY_INLINE void fill_floats(float* to, std::int64_t count, float value) {
  for (std::int64_t i = 0; i < count; ++i) to[i] = value;
}

// v * 2^n for integral n where x, whose exponential it is to be, is at least ln(2^-126); 0 below. Denormal
// results would cost hundreds of cycles each, and hidden scores, e^-inf, are many.
HWY_INLINE Vec scale_unless_tiny(Vec v, Vec n, Vec x) {
  const Vec tiniest = hn::Set(kFloats, -87.33654f);
#if HWY_TARGET == HWY_AVX3
  return Vec{_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x.raw, tiniest.raw, _CMP_NLT_UQ), v.raw, n.raw)};
#else
  // By a product, so that NaN stays NaN whatever integer it converts to.
  const hn::RebindToSigned<FloatTag> words;
  const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(words, n), hn::Set(words, 127)));
  return hn::IfThenZeroElse(hn::Lt(x, tiniest), hn::Mul(v, hn::BitCast(kFloats, exponent)));
#endif
}

// e^x for x up to 88: within 1 ulp of the exact value with kDegree 6; within 2^-21 of it with kDegree 5,
// for what is rounded to a 16-bit float next (its sums, and so lse, are not). Results below 2^-126 are 0, so e^-inf is
// 0, and NaN stays NaN. Reduction by Cody and Waite (1980); the polynomials interpolate (e^r - 1 - r) / r^2 at the
// Chebyshev nodes of |r| <= ln(2) / 2.
template <int kDegree>
HWY_INLINE Vec exponential(Vec x) {
  static_assert(kDegree == 5 || kDegree == 6);
  const Vec n = hn::Round(hn::Mul(x, hn::Set(kFloats, 1.44269504f)));
  const Vec one = hn::Set(kFloats, 1.0f);
  Vec r, p;
  if constexpr (kDegree == 6) {
    r = hn::NegMulAdd(n, hn::Set(kFloats, 0.693359375f), x);
    r = hn::NegMulAdd(n, hn::Set(kFloats, -2.12194440e-4f), r);
    p = hn::MulAdd(hn::Set(kFloats, 0.00139262134663f), r, hn::Set(kFloats, 0.00836320297158f));
    p = hn::MulAdd(p, r, hn::Set(kFloats, 0.0416665544377f));
    p = hn::MulAdd(p, r, hn::Set(kFloats, 0.16666576846f));
    p = hn::MulAdd(p, r, hn::Set(kFloats, 0.5f));
  } else {
    r = hn::NegMulAdd(n, hn::Set(kFloats, 0.693147181f), x);
    p = hn::MulAdd(hn::Set(kFloats, 0.00835722405612f), r, hn::Set(kFloats, 0.0418339715718f));
    p = hn::MulAdd(p, r, hn::Set(kFloats, 0.166666307534f));
    p = hn::MulAdd(p, r, hn::Set(kFloats, 0.499997484871f));
  }
  p = hn::MulAdd(hn::MulAdd(p, r, one), r, one);
  return scale_unless_tiny(p, n, x);
}

// Rational minimax approximation of tanh below 0.625 (S. Moshier, Cephes, 1989), beyond it by e^2x.
HWY_INLINE Vec hyperbolic_tangent(Vec x) {
  const Vec one = hn::Set(kFloats, 1.0f);
  const Vec magnitude = hn::Abs(x);
  const Vec square = hn::Mul(x, x);
  Vec p = hn::MulAdd(hn::Set(kFloats, -5.70498872745e-3f), square, hn::Set(kFloats, 2.06390887954e-2f));
  p = hn::MulAdd(p, square, hn::Set(kFloats, -5.37397155531e-2f));
  p = hn::MulAdd(p, square, hn::Set(kFloats, 1.33314422036e-1f));
  p = hn::MulAdd(p, square, hn::Set(kFloats, -3.33332819422e-1f));
  const Vec small = hn::MulAdd(hn::Mul(p, square), x, x);
  // 1 - 2 / (e^2|x| + 1); beyond 10 it is 1 in single precision.
  const Vec doubled = hn::Min(hn::Set(kFloats, 20.0f), hn::Add(magnitude, magnitude));
  const Vec grown = exponential<6>(doubled);
  const Vec large = hn::Sub(one, hn::Div(hn::Set(kFloats, 2.0f), hn::Add(grown, one)));
  // NaN compares false, and its minimum above may be a number: the polynomial keeps it.
  return hn::IfThenElse(hn::Ge(magnitude, hn::Set(kFloats, 0.625f)), hn::CopySign(large, x), small);
}

// Lanes whose bits are set in the lowest kLanes bits of `bits`.
HWY_INLINE Mask mask_from_bits(std::uint64_t bits) {
  const auto low = static_cast<std::uint16_t>(bits);
  std::uint8_t bytes[8] = {};  // LoadMaskBits may read up to eight
  std::memcpy(bytes, &low, sizeof low);
  return hn::LoadMaskBits(kFloats, bytes);
}

}  // namespace
}  // namespace flash_dmattn::internal::cpu
