// Moving rows of queries, keys and values between global and shared memory.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cuda/attention/shared_tile.cuh"
#include "cuda/ptx/arithmetic.cuh"

namespace flash_dmattn::internal::cuda {

// How the threads of a block divide the rows of a tile: a few neighbours (128 bytes at a time) take a row.
template <int kColumns, int kThreads>
struct RowShares {
  static constexpr int kPieces = SharedTile<kColumns>::kPieces;
  static constexpr int kThreadsPerRow = kPieces % 8 == 0 ? 8 : 4;
  static constexpr int kRowsAtOnce = kThreads / kThreadsPerRow;
  static constexpr int kPiecesPerThread = kPieces / kThreadsPerRow;
};

// Copies one piece of a row of `columns` element by element; what is missing of it is zero.
template <int kColumns>
__device__ __noinline__ void load_piece_by_element(std::uint32_t target, const std::uint16_t* source, int piece,
                                                   int columns) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    std::uint32_t value = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = piece * 8 + 2 * word + half;
      if (source != nullptr && column < columns) value |= static_cast<std::uint32_t>(source[column]) << (16 * half);
    }
    store_shared(target + 4 * word, value);
  }
}

// Tokens of one batch element and head, from one token on.
struct TokenRows {
  const std::uint16_t* base;
  std::int64_t stride;  // elements from row to row; less than 2^30 if rows are aligned

  __device__ const std::uint16_t* row(std::int32_t index) const { return base + index * stride; }

  // The same in one instruction.
  __device__ const std::uint16_t* aligned_row(std::int32_t index) const {
    return offset_pointer(base, index, static_cast<std::int32_t>(stride) * 2);
  }
};

__device__ inline TokenRows rows_of(const TokenView& tokens, int batch, int head, int first) {
  return {static_cast<const std::uint16_t*>(tokens.data) + batch * tokens.batch_stride + head * tokens.head_stride +
              first * tokens.token_stride,
          tokens.token_stride};
}

// Starts copying kRows rows of one or two tensors, each into a tile; index_of(row) says which, less than 0: a row of
// zeros. `columns`: how many each tensor has; from there on the tile's are zero. Rows that are not `aligned` are read
// element by element, and are there when this returns. `thread`: threadIdx.x, or recomputed from it.
template <int kRows, int kColumns, int kThreads, int kTensors, typename IndexOf>
__device__ inline void load_rows(int thread, const SharedTile<kColumns> (&tiles)[kTensors],
                                 const TokenRows (&sources)[kTensors], IndexOf index_of, const int (&columns)[kTensors],
                                 bool aligned) {
  using Shares = RowShares<kColumns, kThreads>;
  constexpr int kSteps = kRows / Shares::kRowsAtOnce;
  constexpr bool kWide = Shares::kPiecesPerThread >= 4;
  static_assert(kRows % Shares::kRowsAtOnce == 0 && Shares::kRowsAtOnce % 8 == 0);
  const int first_row = thread / Shares::kThreadsPerRow, piece = thread % Shares::kThreadsPerRow;
  if (aligned) {
    // All at once: copies that are under way keep later reads of shared memory behind them.
    std::int32_t indices[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) indices[step] = index_of(first_row + step * Shares::kRowsAtOnce);
#pragma unroll
    for (int tensor = 0; tensor < kTensors; ++tensor) {
      // Rows 8 apart are swizzled alike, and pieces kThreadsPerRow apart lie as far apart as they would unswizzled.
      const std::uint32_t target = tiles[tensor].piece(first_row, piece);
      const TokenRows source = {sources[tensor].base + piece * 8, sources[tensor].stride};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const std::int32_t index = indices[step];
        const std::uint16_t* row = kWide ? source.row(index) : source.aligned_row(index);
#pragma unroll
        for (int part = 0; part < Shares::kPiecesPerThread; ++part) {
          const int offset = part * Shares::kThreadsPerRow;
          copy_async_16(target + step * Shares::kRowsAtOnce * SharedTile<kColumns>::kRowBytes + offset * 16,
                        row + offset * 8, index >= 0 && (piece + offset) * 8 < columns[tensor]);
        }
      }
    }
  } else {
#pragma unroll 1
    for (int row = first_row; row < kRows; row += Shares::kRowsAtOnce) {
      const std::int32_t index = index_of(row);
#pragma unroll 1
      for (int at = piece; at < Shares::kPieces; at += Shares::kThreadsPerRow) {
#pragma unroll
        for (int tensor = 0; tensor < kTensors; ++tensor) {
          load_piece_by_element<kColumns>(tiles[tensor].piece(row, at),
                                          index < 0 ? nullptr : sources[tensor].row(index), at, columns[tensor]);
        }
      }
    }
  }
}

// Four words of each of four neighbouring lanes, as a matrix with a row a lane, transposed.
__device__ inline void transpose_quad(std::uint32_t (&words)[4]) {
  const int lane = recomputed(static_cast<int>(threadIdx.x)) % 4;
  // Blocks of two by two change places, then the words of each block.
#pragma unroll
  for (int distance = 2; distance > 0; distance /= 2) {
    const bool high = (lane & distance) != 0;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      if ((word & distance) != 0) continue;
      const std::uint32_t given = high ? words[word] : words[word + distance];
      const std::uint32_t taken = __shfl_xor_sync(~0u, given, distance);
      (high ? words[word] : words[word + distance]) = taken;
    }
  }
}

// Stores a piece of 8 elements, given as four packed words, of a row of `columns`: a multiple of 8, and rows begin at
// multiples of 16 bytes.
__device__ inline void store_piece(std::uint16_t* row, int piece, const std::uint32_t (&words)[4], int columns) {
  if (piece * 8 < columns) {
    __stcs(reinterpret_cast<uint4*>(row + piece * 8), make_uint4(words[0], words[1], words[2], words[3]));
  }
}
// The same; rows that are not `aligned` begin anywhere, and have any number of columns.
__device__ inline void store_piece(std::uint16_t* row, int piece, const std::uint32_t (&words)[4], int columns,
                                   bool aligned) {
  if (aligned) return store_piece(row, piece, words, columns);
#pragma unroll
  for (int element = 0; element < 8; ++element) {
    const int column = piece * 8 + element;
    if (column < columns) row[column] = static_cast<std::uint16_t>(words[element / 2] >> (16 * (element % 2)));
  }
}

}  // namespace flash_dmattn::internal::cuda
