// Products of a few query rows with rows of K and V where those lie in the user's memory: nothing is packed, since no
// row of K or V is used often enough to pay for it. Everything is summed in single precision, and probabilities stay in
// it: what rounding them would save is little beside reading V.
#pragma once

#include "cpu/config.h"
#include "cpu/simd-inl.h"
#include "plan/chunk_plan.h"

namespace flash_dmattn::internal::cpu {
namespace {

// Query rows that one load of K or V serves, so that the sums fit the registers: 32 in AVX-512, 16 in others.
constexpr int kQueryBlock = kLanes == 16 ? 4 : 2;
// Keys whose products are summed over lanes together.
constexpr int kKeyGroup = 4;

// Listed keys that are multiplied at a time, while the next ones' rows are fetched into the L2 cache, which both fit:
// the hardware cannot know where a list goes on, and loses its way where rows of other heads lie between. One block
// ahead: the first ones come at once, beside nothing; a unit that keeps few keys has four, and with three of them ahead
// it took up to 30 % longer.
constexpr int kDecodeBlock = 64;
static_assert(kDecodeBlock % kTileKeys == 0 && kDecodeBlock <= kKeyBlock);

// How queries are multiplied with keys in place: as floats.
template <typename T>
struct Streamed {
  using Query = float;
  using Columns = Vec;
  static constexpr int kWidth = kLanes;  // columns multiplied at once: queries are padded to multiples of it

  static HWY_INLINE void load_query(const T* from, int count, float* to) { convert_row(from, count, to); }
  static HWY_INLINE Vec load(const float* query) { return hn::Load(kFloats, query); }
  static HWY_INLINE Vec load(const T* key, int) { return load_floats(key); }
  static HWY_INLINE Vec load_first(const T* key, int count) { return cpu::load_first(key, count); }
  static HWY_INLINE Vec multiply_add(Vec a, Vec b, Vec sum) { return hn::MulAdd(a, b, sum); }
};

#if HWY_TARGET == HWY_AVX3 && defined(__AVX512BF16__)
// Or as they are, where an instruction multiplies pairs and adds them to a float: products of bfloat16 are exact in it.
template <>
struct Streamed<Bf16> {
  using Query = Bf16;
  using Columns = __m512i;
  static constexpr int kWidth = 2 * kLanes;

  static HWY_INLINE void load_query(const Bf16* from, int count, Bf16* to) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(Bf16));
  }
  static HWY_INLINE __m512i load(const Bf16* query) { return _mm512_loadu_si512(query); }
  static HWY_INLINE __m512i load(const Bf16* key, int) { return _mm512_loadu_si512(key); }
  static HWY_INLINE __m512i load_first(const Bf16* key, int count) {
    return _mm512_maskz_loadu_epi16((__mmask32{1} << count) - 1, key);
  }
  static HWY_INLINE Vec multiply_add(__m512i a, __m512i b, Vec sum) {
    return Vec{_mm512_dpbf16_ps(sum.raw, reinterpret_cast<const __m512bh&>(a), reinterpret_cast<const __m512bh&>(b))};
  }
};
#endif

using FourFloats = hn::FixedTag<float, 4>;

// The upper half of the lanes is added to the lower one, until four are left.
template <typename Tag>
HWY_INLINE hn::Vec<FourFloats> fold_lanes([[maybe_unused]] Tag tag, hn::Vec<Tag> v) {
  if constexpr (hn::MaxLanes(Tag()) == 4) {
    return v;
  } else {
    const hn::Half<Tag> half;
    return fold_lanes(half, hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v)));
  }
}

// The sums of the lanes of each of four vectors.
HWY_INLINE hn::Vec<FourFloats> sum_lanes(Vec a, Vec b, Vec c, Vec d) {
  // Neighbours hold sums of a and b, or of c and d, alternately; then all four alternate.
  const hn::Repartition<std::uint64_t, FloatTag> pairs;
  const auto ab = hn::BitCast(pairs, hn::Add(hn::InterleaveLower(kFloats, a, b), hn::InterleaveUpper(kFloats, a, b)));
  const auto cd = hn::BitCast(pairs, hn::Add(hn::InterleaveLower(kFloats, c, d), hn::InterleaveUpper(kFloats, c, d)));
  return fold_lanes(kFloats, hn::Add(hn::BitCast(kFloats, hn::InterleaveLower(pairs, ab, cd)),
                                     hn::BitCast(kFloats, hn::InterleaveUpper(pairs, ab, cd))));
}

// scores[query][0 to 3] = queries[query] . keys[0 to 3]. Rows `ahead`, if not null, are fetched on the way: as many
// lines as are read, so that neither waits for the other.
template <int kQueries, typename T, typename Query>
HWY_INLINE void multiply_key_group(const Query* HWY_RESTRICT queries, std::ptrdiff_t query_stride, const T* const* keys,
                                   const T* const* ahead, int head_dim, float* HWY_RESTRICT scores) {
  using Math = Streamed<T>;
  Vec sums[kQueries][kKeyGroup];
  for (int query = 0; query < kQueries; ++query) {
    for (int key = 0; key < kKeyGroup; ++key) sums[query][key] = hn::Zero(kFloats);
  }
  const auto add_products = [&](int column, auto load) HWY_ATTR {
    typename Math::Columns columns[kKeyGroup];
    HWY_UNROLL(4)
    for (int key = 0; key < kKeyGroup; ++key) columns[key] = load(keys[key] + column, head_dim - column);
    if (ahead != nullptr && column % kLineElements<T> == 0) {
      for (int key = 0; key < kKeyGroup; ++key) __builtin_prefetch(ahead[key] + column, 0, 2);
    }
    HWY_UNROLL(4)
    for (int query = 0; query < kQueries; ++query) {
      const auto factor = Math::load(queries + query * query_stride + column);
      HWY_UNROLL(4)
      for (int key = 0; key < kKeyGroup; ++key) {
        sums[query][key] = Math::multiply_add(factor, columns[key], sums[query][key]);
      }
    }
  };
  int column = 0;
  for (; column + Math::kWidth <= head_dim; column += Math::kWidth) {
    add_products(column, [](const T* key, int) HWY_ATTR { return Math::load(key, 0); });
  }
  if (column < head_dim) {
    add_products(column, [](const T* key, int count) HWY_ATTR { return Math::load_first(key, count); });
  }
  HWY_UNROLL(4)
  for (int query = 0; query < kQueries; ++query) {
    hn::StoreU(sum_lanes(sums[query][0], sums[query][1], sums[query][2], sums[query][3]), FourFloats(),
               scores + query * kScoreStride);
  }
}

// The same for any number of queries.
template <int kQueries = kQueryBlock, typename T, typename Query>
HWY_INLINE void multiply_queries(const Query* queries, std::ptrdiff_t query_stride, int rows, const T* const* keys,
                                 const T* const* ahead, int head_dim, float* scores) {
  for (; rows >= kQueries; rows -= kQueries, queries += kQueries * query_stride, scores += kQueries * kScoreStride) {
    multiply_key_group<kQueries>(queries, query_stride, keys, ahead, head_dim, scores);
    ahead = nullptr;  // once is enough
  }
  if constexpr (kQueries > 1) {
    if (rows > 0) multiply_queries<kQueries / 2>(queries, query_stride, rows, keys, ahead, head_dim, scores);
  }
}

// scores[row][key] = queries[row] . keys[key] for `count` keys, and zeros up to the end of the tile. `keys` has room
// for whole groups: the last key stands in for those that are missing. `ahead`, whole groups too, or null: rows that
// are fetched on the way.
template <typename T, typename Query>
HWY_NOINLINE void multiply_scores_in_place(const Query* queries, std::ptrdiff_t query_stride, int rows, const T** keys,
                                           const T* const* ahead, int count, int head_dim, float* scores) {
  for (int key = count; key % kKeyGroup != 0; ++key) keys[key] = keys[count - 1];
  int key = 0;
  for (; key < count; key += kKeyGroup) {
    multiply_queries(queries, query_stride, rows, keys + key, ahead != nullptr ? ahead + key : nullptr, head_dim,
                     scores + key);
  }
  for (; key % kTileKeys != 0; ++key) {
    for (int row = 0; row < rows; ++row) scores[row * kScoreStride + key] = 0.0f;
  }
}

// kVectors vectors of columns, from `column` on, of out[row] += sum over keys of weights[row][key] * values[key]. The
// last vector may have fewer columns (`load`). Sums of a block of keys begin at 0, so that long sums of short ones
// round less than one that is longer still.
template <int kRows, int kVectors, typename T, typename Load>
HWY_INLINE void accumulate_columns(const float* HWY_RESTRICT weights, const T* const* values, const T* const* ahead,
                                   int count, int column, Load load, float* HWY_RESTRICT out,
                                   std::ptrdiff_t out_stride) {
  Vec sums[kRows][kVectors];
  for (int row = 0; row < kRows; ++row) {
    for (int v = 0; v < kVectors; ++v) sums[row][v] = hn::Zero(kFloats);
  }
  for (int key = 0; key < count; ++key) {
    if (ahead != nullptr) prefetch_row<0, 2>(ahead[key] + column, kVectors * kLanes);
    Vec columns[kVectors];
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) columns[v] = load(values[key] + column + v * kLanes);
    HWY_UNROLL(4)
    for (int row = 0; row < kRows; ++row) {
      const Vec weight = hn::Set(kFloats, weights[row * kScoreStride + key]);
      HWY_UNROLL(8)
      for (int v = 0; v < kVectors; ++v) sums[row][v] = hn::MulAdd(weight, columns[v], sums[row][v]);
    }
  }
  HWY_UNROLL(4)
  for (int row = 0; row < kRows; ++row) {
    HWY_UNROLL(8)
    for (int v = 0; v < kVectors; ++v) {
      float* to = out + row * out_stride + column + v * kLanes;
      hn::Store(hn::Add(hn::Load(kFloats, to), sums[row][v]), kFloats, to);
    }
  }
}

// All columns from `column` on.
template <int kRows, int kVectors, typename T>
HWY_INLINE void accumulate_all_columns(const float* weights, const T* const* values, const T* const* ahead, int count,
                                       int column, int head_dim, float* out, std::ptrdiff_t out_stride) {
  for (; column + kVectors * kLanes <= head_dim; column += kVectors * kLanes) {
    accumulate_columns<kRows, kVectors>(
        weights, values, ahead, count, column, [](const T* from) HWY_ATTR { return load_floats(from); }, out,
        out_stride);
  }
  if constexpr (kVectors > 1) {
    accumulate_all_columns<kRows, kVectors / 2>(weights, values, ahead, count, column, head_dim, out, out_stride);
  } else if (column < head_dim) {
    accumulate_columns<kRows, 1>(
        weights, values, ahead, count, column,
        [&](const T* from) HWY_ATTR { return load_first(from, head_dim - column); }, out, out_stride);
  }
}

// out[row] += sum over `count` keys of weights[row][key] * values[key].
template <int kRows = kQueryBlock, typename T>
HWY_NOINLINE void accumulate_rows_in_place(const float* weights, int rows, const T* const* values,
                                           const T* const* ahead, int count, int head_dim, float* out,
                                           std::ptrdiff_t out_stride) {
  constexpr int kVectors = kRows == 1 ? 8 : kQueryBlock == 4 ? 16 / kRows : 8 / kRows;
  for (; rows >= kRows; rows -= kRows, weights += kRows * kScoreStride, out += kRows * out_stride) {
    accumulate_all_columns<kRows, kVectors>(weights, values, ahead, count, 0, head_dim, out, out_stride);
    ahead = nullptr;  // once is enough
  }
  if constexpr (kRows > 1) {
    if (rows > 0) accumulate_rows_in_place<kRows / 2>(weights, rows, values, ahead, count, head_dim, out, out_stride);
  }
}

}  // namespace
}  // namespace flash_dmattn::internal::cpu
