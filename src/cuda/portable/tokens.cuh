// Moving rows of queries, keys and values between global and shared memory.
#pragma once

#include <cstdint>

#include "api/problem.h"
#include "cuda/ptx/shared_tile.cuh"

namespace flash_dmattn::internal::cuda {

// How the threads of a block share the rows of a tile: a few neighbours (128 bytes at a time) take a row.
template <int kColumns, int kThreads>
struct RowShares {
  static constexpr int kPieces = SharedTile<kColumns>::kPieces;
  static constexpr int kThreadsPerRow = kPieces % 8 == 0 ? 8 : 4;
  static constexpr int kRowsAtOnce = kThreads / kThreadsPerRow;
  static constexpr int kPiecesPerThread = kPieces / kThreadsPerRow;

  __device__ static int row() { return static_cast<int>(threadIdx.x) / kThreadsPerRow; }
  __device__ static int piece() { return static_cast<int>(threadIdx.x) % kThreadsPerRow; }
};

// Copies one piece element by element; columns from head_dim on are zero.
template <int kColumns>
__device__ __noinline__ void load_piece_by_element(std::uint32_t target, const std::uint16_t* source, int piece,
                                                   int head_dim) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    std::uint32_t value = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = piece * 8 + 2 * word + half;
      if (source != nullptr && column < head_dim) value |= static_cast<std::uint32_t>(source[column]) << (16 * half);
    }
    store_shared(target + 4 * word, value);
  }
}

// Where a row begins, and whether there is such a row; otherwise it is made of zeros and not read.
struct RowSource {
  const std::uint16_t* pointer;
  bool exists;
};

// Row `index` of tokens that begin at `base`. `aligned` tokens have strides of less than 2^31 bytes.
__device__ inline const std::uint16_t* row_pointer(const std::uint16_t* base, std::int32_t index,
                                                   const TokenView& tokens, bool aligned) {
  if (!aligned) return base + index * tokens.token_stride;
  const auto bytes = static_cast<std::int32_t>(tokens.token_stride) * 2;
  return reinterpret_cast<const std::uint16_t*>(reinterpret_cast<const char*>(base) +
                                                static_cast<std::int64_t>(index) * bytes);
}

struct RowSourcePair {
  const std::uint16_t *first, *second;
  bool exist;
};

// Starts copying kRows rows into each of two tiles; source_of(row, aligned) says where they are. Columns from head_dim
// on are zero. Rows that are not `aligned` are read element by element, and are there when this returns.
template <int kRows, int kColumns, int kThreads, bool kPair, typename SourceOf>
__device__ inline void load_rows_of(SharedTile<kColumns> first, SharedTile<kColumns> second, SourceOf source_of,
                                    int head_dim, bool aligned) {
  using Shares = RowShares<kColumns, kThreads>;
  static_assert(kRows % Shares::kRowsAtOnce == 0 && Shares::kRowsAtOnce % 8 == 0);
  const int piece = Shares::piece();
  if (aligned) {
    // Rows 8 apart are swizzled alike, and pieces kThreadsPerRow apart lie as far apart as they would unswizzled.
    const std::uint32_t target = first.piece(Shares::row(), piece);
#pragma unroll
    for (int step = 0; step < kRows / Shares::kRowsAtOnce; ++step) {
      const RowSourcePair source = source_of(Shares::row() + step * Shares::kRowsAtOnce, true);
#pragma unroll
      for (int part = 0; part < Shares::kPiecesPerThread; ++part) {
        const int offset = part * Shares::kThreadsPerRow;
        const bool valid = source.exist && (piece + offset) * 8 < head_dim;
        const std::uint32_t place = target + step * Shares::kRowsAtOnce * SharedTile<kColumns>::kRowBytes + offset * 16;
        copy_async_16(place, source.first + (piece + offset) * 8, valid);
        if (kPair) copy_async_16(place + second.address - first.address, source.second + (piece + offset) * 8, valid);
      }
    }
  } else {
#pragma unroll 1
    for (int row = Shares::row(); row < kRows; row += Shares::kRowsAtOnce) {
      const RowSourcePair source = source_of(row, false);
#pragma unroll 1
      for (int at = piece; at < Shares::kPieces; at += Shares::kThreadsPerRow) {
        load_piece_by_element<kColumns>(first.piece(row, at), source.exist ? source.first : nullptr, at, head_dim);
        if (kPair) {
          load_piece_by_element<kColumns>(second.piece(row, at), source.exist ? source.second : nullptr, at, head_dim);
        }
      }
    }
  }
}

template <int kRows, int kColumns, int kThreads, typename SourceOf>
__device__ inline void load_rows(SharedTile<kColumns> tile, SourceOf source_of, int head_dim, bool aligned) {
  load_rows_of<kRows, kColumns, kThreads, false>(
      tile, tile,
      [&](int row, bool is_aligned) {
        const RowSource source = source_of(row, is_aligned);
        return RowSourcePair{source.pointer, source.pointer, source.exists};
      },
      head_dim, aligned);
}

template <int kRows, int kColumns, int kThreads, typename SourceOf>
__device__ inline void load_row_pairs(SharedTile<kColumns> first, SharedTile<kColumns> second, SourceOf source_of,
                                      int head_dim, bool aligned) {
  load_rows_of<kRows, kColumns, kThreads, true>(first, second, source_of, head_dim, aligned);
}

// Stores one row's piece of 8 elements, given as four packed words.
__device__ inline void store_piece(std::uint16_t* row, int piece, const std::uint32_t (&words)[4], int head_dim,
                                   bool aligned) {
  if (aligned) {
    if (piece * 8 < head_dim) {
      *reinterpret_cast<uint4*>(row + piece * 8) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return;
  }
#pragma unroll
  for (int element = 0; element < 8; ++element) {
    const int column = piece * 8 + element;
    if (column < head_dim) row[column] = static_cast<std::uint16_t>(words[element / 2] >> (16 * (element % 2)));
  }
}

__device__ inline void load_shared_16(std::uint32_t (&words)[4], std::uint32_t shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(shared)
               : "memory");
}

}  // namespace flash_dmattn::internal::cuda
