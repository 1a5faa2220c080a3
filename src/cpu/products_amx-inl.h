// The products of attention on AMX: tiles of 16 rows of 32 bfloat16, which the core multiplies into tiles
// of 16 x 16 floats (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18).
#pragma once

#include "cpu/pack_bf16-inl.h"

namespace flash_dmattn::internal::cpu {
namespace {

constexpr int kTileRows = 16;
constexpr int kTileColumns = 16;  // floats, or pairs of bfloat16
constexpr int kTileDepth = 32;    // bfloat16 summed over by one instruction

// A word address and the distance between the rows of a tile, in words.
struct TileRowsOf {
  const Pair* data;
  std::ptrdiff_t stride;
};

// Each worker sets its tiles up before its first product: all eight at full size.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
// In static memory: GCC 12's intrinsic tells the optimiser only of the first eight bytes that it reads.
constexpr TileConfig kFullTiles;

inline void configure_tiles() { _tile_loadconfig(&kFullTiles); }
inline void release_tiles() { _tile_release(); }

// kM x kN tiles of C += A * B over `steps` tiles of depth. Tiles 0 to 3 hold C, 4 and 5 A, 6 and 7 B.
template <int kM, int kN>
HWY_INLINE void multiply_tiles(TileRowsOf a, TileRowsOf b, std::ptrdiff_t panel_stride, int steps, float* c,
                               std::ptrdiff_t c_stride, bool accumulate) {
  const auto c_bytes = static_cast<std::size_t>(c_stride) * sizeof(float);
  const auto a_bytes = static_cast<std::size_t>(a.stride) * sizeof(Pair);
  const auto b_bytes = static_cast<std::size_t>(b.stride) * sizeof(Pair);
  float* c_below = c + kTileRows * c_stride;
  if (accumulate) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (kN > 1) _tile_loadd(1, c + kTileColumns, c_bytes);
    if constexpr (kM > 1) _tile_loadd(2, c_below, c_bytes);
    if constexpr (kM > 1 && kN > 1) _tile_loadd(3, c_below + kTileColumns, c_bytes);
  } else {
    _tile_zero(0);
    if constexpr (kN > 1) _tile_zero(1);
    if constexpr (kM > 1) _tile_zero(2);
    if constexpr (kM > 1 && kN > 1) _tile_zero(3);
  }
  for (int step = 0; step < steps; ++step) {
    const Pair* a_tile = a.data + step * (kTileDepth / 2);
    const Pair* b_tile = b.data + step * (kTileDepth / 2) * b.stride;
    _tile_loadd(4, a_tile, a_bytes);
    _tile_loadd(6, b_tile, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kN > 1) {
      _tile_loadd(7, b_tile + panel_stride, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kM > 1) {
      _tile_loadd(5, a_tile + kTileRows * a.stride, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kN > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (kN > 1) _tile_stored(1, c + kTileColumns, c_bytes);
  if constexpr (kM > 1) _tile_stored(2, c_below, c_bytes);
  if constexpr (kM > 1 && kN > 1) _tile_stored(3, c_below + kTileColumns, c_bytes);
}

template <int kM>
HWY_INLINE void multiply_tile_rows(TileRowsOf a, TileRowsOf b, std::ptrdiff_t panel_stride, int column_tiles, int steps,
                                   float* c, std::ptrdiff_t c_stride, bool accumulate) {
  for (; column_tiles >= 2; column_tiles -= 2) {
    multiply_tiles<kM, 2>(a, b, panel_stride, steps, c, c_stride, accumulate);
    b.data += 2 * panel_stride;
    c += 2 * kTileColumns;
  }
  if (column_tiles > 0) multiply_tiles<kM, 1>(a, b, panel_stride, steps, c, c_stride, accumulate);
}

// C = or += A * B in tiles; B's columns come in panels of 16 words, `panel_stride` words apart.
HWY_INLINE void multiply_by_tiles(TileRowsOf a, TileRowsOf b, std::ptrdiff_t panel_stride, int row_tiles,
                                  int column_tiles, int steps, float* c, std::ptrdiff_t c_stride, bool accumulate) {
  for (; row_tiles >= 2; row_tiles -= 2) {
    multiply_tile_rows<2>(a, b, panel_stride, column_tiles, steps, c, c_stride, accumulate);
    a.data += 2 * kTileRows * a.stride;
    c += 2 * kTileRows * c_stride;
  }
  if (row_tiles > 0) multiply_tile_rows<1>(a, b, panel_stride, column_tiles, steps, c, c_stride, accumulate);
}

// Stands in for VectorProducts. Rows and columns of a product are padded to whole tiles; what the padding
// rows hold is never read.
struct AmxProducts {
  using Packed = Pair;
  static constexpr bool kMultipliesPairs = true;
  static constexpr int kExpDegree = 5;

  static int depth_words(int head_dim) { return static_cast<int>(round_up(head_dim, kTileDepth)) / 2; }
  static int out_stride(int head_dim) { return static_cast<int>(round_up(head_dim, kTileColumns)); }

  static std::size_t left_size(std::int64_t rows, int head_dim) {
    return static_cast<std::size_t>(rows * depth_words(head_dim));
  }
  static std::size_t columns_size(std::int64_t rows, int head_dim) { return left_size(rows, head_dim); }
  static std::size_t depth_size(std::int64_t rows, int head_dim) {
    return static_cast<std::size_t>(rows / 2 * out_stride(head_dim));
  }

  template <int kRowTile, typename T>
  static void pack_left(const RowSource<T>& source, int padded_rows, Packed* to) {
    const int words = depth_words(source.head_dim);
    for (int row = 0; row < padded_rows; ++row, to += words) {
      const Pair* from = fetch_pairs(source, row, words, to);
      if (from != to) std::memcpy(to, from, static_cast<std::size_t>(words) * sizeof(Pair));
    }
  }
  template <typename T>
  static void pack_columns(const RowSource<T>& source, int padded_rows, Packed* to) {
    const int words = depth_words(source.head_dim);
    transpose_rows<kTileColumns>(
        padded_rows, words, [&](int row, Pair* buffer) { return fetch_pairs(source, row, words, buffer); }, to);
  }
  template <typename T>
  static void pack_depth(const RowSource<T>& source, int padded_rows, Packed* to) {
    pack_row_pairs(source, padded_rows, to);
  }

  template <int kRowTile>
  static void multiply_scores(const Packed* left, int row_tile, int rows, const Packed* columns, int head_dim,
                              int begin, int end, float* scores) {
    const int words = depth_words(head_dim);
    multiply_by_tiles({left + static_cast<std::int64_t>(row_tile) * kRowTile * words, words},
                      {columns + static_cast<std::int64_t>(begin) * words, kTileColumns},
                      static_cast<std::ptrdiff_t>(words) * kTileColumns, tiles(rows), (end - begin) / kTileColumns,
                      2 * words / kTileDepth, scores + begin, kScoreStride, false);
  }

  static HWY_INLINE void store_probabilities(Vec p, float* scores, int key) { store_bf16(p, scores, key); }

  static void accumulate_rows(const float* scores, int rows, const Packed* depth, int packed_rows, int head_dim,
                              int begin, int end, float* out) {
    multiply_by_tiles({reinterpret_cast<const Pair*>(scores) + begin / 2, kScoreStride},
                      {depth + static_cast<std::int64_t>(begin / 2) * kTileColumns, kTileColumns},
                      static_cast<std::ptrdiff_t>(packed_rows / 2) * kTileColumns, tiles(rows),
                      out_stride(head_dim) / kTileColumns, (end - begin) / kTileDepth, out, out_stride(head_dim), true);
  }

  // ---- Backward. The sums over rows are taken transposed, (head dim x keys), because it is the right
  // operand that can be made from pairs of rows.

  static std::size_t rows_size(std::int64_t rows, int head_dim) { return depth_size(rows, head_dim); }
  // [row tile][head dim][kRowTile] of bfloat16.
  template <int kRowTile, typename T>
  static void pack_row_operand(const RowSource<T>& source, int padded_rows, Packed* to) {
    const int columns = out_stride(source.head_dim);
    auto* halves = reinterpret_cast<std::uint16_t*>(to);
    Pair buffer[kMaxHeadDim / 2];
    for (int row = 0; row < padded_rows; ++row) {
      const auto* from = reinterpret_cast<const std::uint16_t*>(fetch_pairs(source, row, columns / 2, buffer));
      std::uint16_t* tile = halves + static_cast<std::int64_t>(row / kRowTile) * kRowTile * columns + row % kRowTile;
      for (int column = 0; column < columns; ++column) tile[column * kRowTile] = from[column];
    }
  }
  static std::size_t block_size(int head_dim) { return static_cast<std::size_t>(out_stride(head_dim) * kScoreStride); }
  static void clear_block(int head_dim, int keys, float* block) {
    for (int column = 0; column < out_stride(head_dim); ++column)
      fill_floats(block + column * kScoreStride, keys, 0.0f);
  }

  template <int kRowTile>
  static void accumulate_columns(const float* scores, int row_tile, int rows, const Packed* operand, int, int head_dim,
                                 int begin, int end, float* block) {
    static_assert(kRowTile % kTileDepth == 0);
    alignas(64) Pair paired[kPairedScores];
    const int padded = static_cast<int>(round_up(rows, kTileDepth));
    pair_rows(scores, rows, padded, begin, end, paired);
    const int columns = out_stride(head_dim);
    multiply_by_tiles({operand + static_cast<std::int64_t>(row_tile) * kRowTile / 2 * columns, kRowTile / 2},
                      {paired + begin, kScoreStride}, kTileColumns, columns / kTileRows, (end - begin) / kTileColumns,
                      padded / kTileDepth, block + begin, kScoreStride, true);
  }

  template <typename Target>
  static void scatter_block(const float* block, int head_dim, int count, Target target, std::int64_t sums_stride,
                            float* sums) {
    const hn::FixedTag<float, 4> floats;
    for (int key = 0; key < count; key += 4) {
      const int keys = count - key < 4 ? count - key : 4;
      for (int column = 0; column < out_stride(head_dim); column += 4) {
        const float* rows[4];
        for (int i = 0; i < 4; ++i) rows[i] = block + (column + i) * kScoreStride;
        HWY_ALIGN float transposed[16];
        transpose_4x4(rows, key, transposed, 4);
        for (int i = 0; i < keys; ++i) {
          float* to = sums + target(key + i) * sums_stride + column;
          hn::Store(hn::Add(hn::Load(floats, to), hn::Load(floats, transposed + 4 * i)), floats, to);
        }
      }
    }
  }

 private:
  static int tiles(int rows) { return (rows + kTileRows - 1) / kTileRows; }
};

}  // namespace
}  // namespace flash_dmattn::internal::cpu
