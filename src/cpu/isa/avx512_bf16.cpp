#include "cpu/kernels-inl.h"
#include "cpu/pack_bf16-inl.h"
#include "cpu/products_vector-inl.h"

namespace flash_dmattn::internal::cpu {
namespace {

// VDPBF16PS: each lane adds the products of two pairs of bfloat16 to a float.
struct Bf16Math {
  using Word = Pair;
  using Columns = __m512i;
  static constexpr int kPerWord = 2;
  static constexpr int kExpDegree = 5;

  static HWY_INLINE __m512i load(const Pair* from) { return _mm512_load_si512(from); }
  static HWY_INLINE __m512i broadcast(const Pair* from) { return _mm512_set1_epi32(static_cast<int>(*from)); }
  static HWY_INLINE Vec multiply_add(__m512i factor, __m512i columns, Vec sum) {
    return Vec{_mm512_dpbf16_ps(sum.raw, reinterpret_cast<const __m512bh&>(factor),
                                reinterpret_cast<const __m512bh&>(columns))};
  }
  static HWY_INLINE void store_probabilities(Vec p, float* scores, int key) { store_bf16(p, scores, key); }

  static HWY_INLINE const Pair* fetch_row(const RowSource<Bf16>& source, int row, Pair* buffer) {
    return fetch_pairs(source, row, (source.head_dim + 1) / 2, buffer);
  }
  static HWY_INLINE void pack_depth(const RowSource<Bf16>& source, int padded_rows, Pair* panels) {
    pack_row_pairs(source, padded_rows, panels);
  }
  template <typename Use>
  static HWY_INLINE void with_transposed(const float* scores, int rows, int begin, int end, Use use) {
    alignas(64) Pair paired[kPairedScores];
    pair_rows(scores, rows, (rows + 1) / 2 * 2, begin, end, paired);
    use.template operator()<kScoreStride>(paired + begin);
  }
};

}  // namespace

const KernelSet kAvx512Bf16Kernels = {
    "avx512_bf16",
    {},
    {},
    make_kernels<VectorProducts<Bf16Math>, Bf16>(),
};

}  // namespace flash_dmattn::internal::cpu
