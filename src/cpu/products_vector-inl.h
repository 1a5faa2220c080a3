// The products of attention on vector registers: blocks of C accumulate in registers while B streams from
// packed panels. Written once for single precision and for bfloat16 dot products, which differ in what a
// 32-bit word of an operand is: one float, or a pair of bfloat16 that are neighbours in the summation.
#pragma once

#include "cpu/config.h"
#include "cpu/pack-inl.h"
#include "cpu/simd-inl.h"

namespace flash_dmattn::internal::cpu {
namespace {

// A panel is one vector of columns; so many are multiplied at a time.
constexpr int kBlockVectors = 2;

// Rows of C held in registers, so that kBlockRows * kBlockVectors accumulators, as many panel rows and one
// broadcast fit the register file.
constexpr int kBlockRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;

// How word k of row m of A is found: at k * kStride + m when transposed, else at m * kStride + k.
template <bool kTransposed, int kStride>
struct Operand {
  static constexpr bool transposed = kTransposed;
  static constexpr int stride = kStride;
};

// What becomes of C.
enum class Sums : std::uint8_t {
  kNew,        // it is overwritten
  kContinued,  // products are added to it one after another, with no sum to load and add at the end
  kAdded,      // sums of the products are added to it: of many terms, sums of shorter sums round far less
};

template <typename Math, typename A, int kRows, int kVectors>
HWY_INLINE void multiply_block(const typename Math::Word* HWY_RESTRICT a, const typename Math::Word* HWY_RESTRICT panel,
                               std::ptrdiff_t panel_stride, int depth, float* HWY_RESTRICT c, std::ptrdiff_t c_stride,
                               Sums kind) {
  Vec sums[kRows][kVectors];
  HWY_UNROLL(12)
  for (int row = 0; row < kRows; ++row) {
    HWY_UNROLL(2)
    for (int v = 0; v < kVectors; ++v) {
      sums[row][v] = kind == Sums::kContinued ? hn::LoadU(kFloats, c + row * c_stride + v * kLanes) : hn::Zero(kFloats);
    }
  }
  const typename Math::Word* second = panel + panel_stride;
  for (int k = 0; k < depth; ++k) {
    typename Math::Columns columns[kVectors];
    columns[0] = Math::load(panel + k * kLanes);
    if constexpr (kVectors > 1) columns[1] = Math::load(second + k * kLanes);
    HWY_UNROLL(12)
    for (int row = 0; row < kRows; ++row) {
      const auto factor = Math::broadcast(A::transposed ? a + row : a + row * A::stride);
      HWY_UNROLL(2)
      for (int v = 0; v < kVectors; ++v) sums[row][v] = Math::multiply_add(factor, columns[v], sums[row][v]);
    }
    a += A::transposed ? A::stride : 1;
  }
  HWY_UNROLL(12)
  for (int row = 0; row < kRows; ++row) {
    HWY_UNROLL(2)
    for (int v = 0; v < kVectors; ++v) {
      float* to = c + row * c_stride + v * kLanes;
      hn::StoreU(kind == Sums::kAdded ? hn::Add(hn::LoadU(kFloats, to), sums[row][v]) : sums[row][v], kFloats, to);
    }
  }
}

// The last rows of C, fewer than kBlockRows, in blocks of a power of two.
template <typename Math, typename A, int kRows, int kVectors>
HWY_INLINE void multiply_tail(const typename Math::Word* a, const typename Math::Word* panel,
                              std::ptrdiff_t panel_stride, int rows, int depth, float* c, std::ptrdiff_t c_stride,
                              Sums kind) {
  if constexpr (kRows > 0) {
    if (rows >= kRows) {
      multiply_block<Math, A, kRows, kVectors>(a, panel, panel_stride, depth, c, c_stride, kind);
      a += A::transposed ? kRows : kRows * A::stride;
      c += kRows * c_stride;
      rows -= kRows;
    }
    multiply_tail<Math, A, kRows / 2, kVectors>(a, panel, panel_stride, rows, depth, c, c_stride, kind);
  }
}

template <typename Math, typename A, int kVectors>
HWY_NOINLINE void multiply_panels(const typename Math::Word* a, const typename Math::Word* panel,
                                  std::ptrdiff_t panel_stride, int rows, int depth, float* c, std::ptrdiff_t c_stride,
                                  Sums kind) {
  for (; rows >= kBlockRows; rows -= kBlockRows) {
    multiply_block<Math, A, kBlockRows, kVectors>(a, panel, panel_stride, depth, c, c_stride, kind);
    a += A::transposed ? kBlockRows : kBlockRows * A::stride;
    c += kBlockRows * c_stride;
  }
  multiply_tail<Math, A,
                kBlockRows == 4   ? 2
                : kBlockRows == 6 ? 4
                                  : 8,
                kVectors>(a, panel, panel_stride, rows, depth, c, c_stride, kind);
}

// C (rows x columns) = or += A (rows x depth) * B (depth x columns), depth in words. B's panels are
// `panel_stride` words apart; columns are a multiple of kLanes.
template <typename Math, typename A>
HWY_INLINE void multiply(const typename Math::Word* a, const typename Math::Word* panels, std::ptrdiff_t panel_stride,
                         int rows, int columns, int depth, float* c, std::ptrdiff_t c_stride, Sums kind) {
  int column = 0;
  for (; column + kBlockVectors * kLanes <= columns; column += kBlockVectors * kLanes) {
    multiply_panels<Math, A, kBlockVectors>(a, panels, panel_stride, rows, depth, c + column, c_stride, kind);
    panels += kBlockVectors * panel_stride;
  }
  if (column < columns) {
    multiply_panels<Math, A, 1>(a, panels, panel_stride, rows, depth, c + column, c_stride, kind);
  }
}

struct Fp32Math {
  using Word = float;
  using Columns = Vec;
  static constexpr int kPerWord = 1;
  static constexpr int kExpDegree = 6;

  static HWY_INLINE Vec load(const float* from) { return hn::Load(kFloats, from); }
  static HWY_INLINE Vec broadcast(const float* from) { return hn::Set(kFloats, *from); }
  static HWY_INLINE Vec multiply_add(Vec factor, Vec columns, Vec sum) { return hn::MulAdd(factor, columns, sum); }
  static HWY_INLINE void store_probabilities(Vec p, float* scores, int key) { hn::Store(p, kFloats, scores + key); }

  template <typename T>
  static HWY_INLINE const float* fetch_row(const RowSource<T>& source, int row, float* buffer) {
    return fetch_floats(source, row, buffer);
  }
  template <typename T>
  static HWY_INLINE void pack_depth(const RowSource<T>& source, int padded_rows, float* panels) {
    pack_rows(source, padded_rows, panels);
  }
  // Scores as the transposed left operand, whose depth is the rows.
  template <typename Use>
  static HWY_INLINE void with_transposed(const float* scores, int, int begin, int, Use use) {
    use.template operator()<kScoreStride>(scores + begin);
  }
};

// What a kernel needs of an instruction set: how operands are packed, and the products on them. Scores and
// what is computed from them are rows of kScoreStride floats, which store_probabilities overwrites with the
// form that the products read.
template <typename Math>
struct VectorProducts {
  using Packed = typename Math::Word;
  static constexpr bool kMultipliesPairs = Math::kPerWord == 2;
  static constexpr int kExpDegree = Math::kExpDegree;

  static constexpr int words(int elements) { return (elements + Math::kPerWord - 1) / Math::kPerWord; }
  static int out_stride(int head_dim) { return static_cast<int>(round_up(head_dim, kLanes)); }

  // Words of packed operands of `rows` rows, a multiple of kTileKeys or of a row tile.
  static std::size_t left_size(std::int64_t rows, int head_dim) {
    return static_cast<std::size_t>(rows * words(head_dim));
  }
  static std::size_t columns_size(std::int64_t rows, int head_dim) { return left_size(rows, head_dim); }
  static std::size_t depth_size(std::int64_t rows, int head_dim) {
    return static_cast<std::size_t>(rows / Math::kPerWord * out_stride(head_dim));
  }

  // Query rows, the left operand of scores: [row tile][word][kRowTile].
  template <int kRowTile, typename T>
  static void pack_left(const RowSource<T>& source, int padded_rows, Packed* to) {
    transpose<kRowTile>(source, padded_rows, to);
  }
  // Key rows as columns of the right operand, whose depth is the head dim.
  template <typename T>
  static void pack_columns(const RowSource<T>& source, int padded_rows, Packed* to) {
    transpose<kLanes>(source, padded_rows, to);
  }
  // Key rows as the depth of the right operand, whose columns are the head dim.
  template <typename T>
  static void pack_depth(const RowSource<T>& source, int padded_rows, Packed* to) {
    Math::pack_depth(source, padded_rows, to);
  }

  // scores[row][key] = left[row] . columns[key] for keys [begin, end), multiples of kTileKeys.
  template <int kRowTile>
  static void multiply_scores(const Packed* left, int row_tile, int rows, const Packed* columns, int head_dim,
                              int begin, int end, float* scores) {
    const int depth = words(head_dim);
    multiply<Math, Operand<true, kRowTile>>(left + static_cast<std::int64_t>(row_tile) * kRowTile * depth,
                                            columns + static_cast<std::int64_t>(begin) * depth,
                                            static_cast<std::ptrdiff_t>(depth) * kLanes, rows, end - begin, depth,
                                            scores + begin, kScoreStride, Sums::kNew);
  }

  static HWY_INLINE void store_probabilities(Vec p, float* scores, int key) {
    Math::store_probabilities(p, scores, key);
  }

  // out[row] += sum over keys [begin, end) of scores[row][key] * depth[key]; `packed_rows` of depth.
  static void accumulate_rows(const float* scores, int rows, const Packed* depth, int packed_rows, int head_dim,
                              int begin, int end, float* out) {
    multiply<Math, Operand<false, kScoreStride>>(reinterpret_cast<const Packed*>(scores) + words(begin),
                                                 depth + static_cast<std::int64_t>(words(begin)) * kLanes,
                                                 static_cast<std::ptrdiff_t>(words(packed_rows)) * kLanes, rows,
                                                 out_stride(head_dim), words(end - begin), out, out_stride(head_dim),
                                                 Sums::kAdded);
  }

  // ---- Backward: sums over the rows of a tile, for a block of keys.

  // Query (or dout) rows as the right operand whose depth is the rows.
  static std::size_t rows_size(std::int64_t rows, int head_dim) { return depth_size(rows, head_dim); }
  template <int kRowTile, typename T>
  static void pack_row_operand(const RowSource<T>& source, int padded_rows, Packed* to) {
    Math::pack_depth(source, padded_rows, to);
  }
  static std::size_t block_size(int head_dim) { return static_cast<std::size_t>(kKeyBlock * out_stride(head_dim)); }

  static void clear_block(int head_dim, int keys, float* block) {
    fill_floats(block, static_cast<std::int64_t>(keys) * out_stride(head_dim), 0.0f);
  }

  // block[key] += sum over the tile's rows of scores[row][key] * operand[row], for keys [begin, end).
  template <int kRowTile>
  static void accumulate_columns(const float* scores, int row_tile, int rows, const Packed* operand, int padded_rows,
                                 int head_dim, int begin, int end, float* block) {
    const int columns = out_stride(head_dim);
    Math::with_transposed(scores, rows, begin, end, [&]<int kStride>(const Packed* transposed) {
      multiply<Math, Operand<true, kStride>>(
          transposed, operand + static_cast<std::int64_t>(words(row_tile * kRowTile)) * kLanes,
          static_cast<std::ptrdiff_t>(words(padded_rows)) * kLanes, end - begin, columns, words(rows),
          block + static_cast<std::int64_t>(begin) * columns, columns, Sums::kContinued);
    });
  }

  // sums[target(key)] += block[key] for `count` keys; rows of sums are `sums_stride` apart.
  template <typename Target>
  static void scatter_block(const float* block, int head_dim, int count, Target target, std::int64_t sums_stride,
                            float* sums) {
    const int columns = out_stride(head_dim);
    for (int key = 0; key < count; ++key) {
      float* to = sums + target(key) * sums_stride;
      const float* from = block + static_cast<std::int64_t>(key) * columns;
      for (int i = 0; i < columns; i += kLanes) {
        hn::Store(hn::Add(hn::Load(kFloats, to + i), hn::Load(kFloats, from + i)), kFloats, to + i);
      }
    }
  }

 private:
  template <int kWidth, typename T>
  static void transpose(const RowSource<T>& source, int padded_rows, Packed* to) {
    transpose_rows<kWidth>(
        padded_rows, words(source.head_dim),
        [&](int row, Packed* buffer) { return Math::fetch_row(source, row, buffer); }, to);
  }
};

using Fp32Products = VectorProducts<Fp32Math>;

}  // namespace
}  // namespace flash_dmattn::internal::cpu
