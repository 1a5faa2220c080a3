// Hopper's product of a warp group (wgmma, sm_90a): sum += A B with a 64-row A, asynchronous. B lies in shared memory,
// A there or in registers. Warp w of the group holds rows 16 w ... of the sum, in the layout of mma.cuh: sum[n][i] is
// column 8 n + ... of its row.
//
// Order of use: wgmma_fence (registers that were written are ready), products, wgmma_commit, and before a sum is read
// wgmma_wait and `settle`.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash_dmattn::internal::cuda {

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `kPending` of the warp group's latest groups of products are under way.
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// To the compiler a sum is there once its product was issued. After the wait this says that it has changed since.
template <int kNTiles>
__device__ inline void settle(float (&sum)[kNTiles][4]) {
#pragma unroll
  for (int n = 0; n < kNTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sum[n][i])::"memory");
}

// Stores four 8x8 matrices of 16-bit elements: of each a lane holds two neighbours of row lane / 4, as in a fragment of
// A (mma.cuh), and lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void store_matrices(std::uint32_t shared, const std::uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(fragment[0]),
               "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}
// The same of their transposes.
__device__ inline void store_matrices_transposed(std::uint32_t shared, const std::uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(fragment[0]),
               "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

// A matrix in shared memory, PTX ISA "Matrix Descriptor Format": panels of 64 columns, 128 bytes a row, whose pieces of
// 16 bytes are swizzled (piece ^ row % 8); a panel begins at a multiple of 1024 bytes. `row_group`: bytes from one
// group of 8 rows to the next. `panel`: bytes from panel to panel, of which the instruction knows only where columns
// are the product's rows or columns, not its depth.
__device__ inline std::uint64_t matrix_descriptor(std::uint32_t address, std::uint32_t panel, std::uint32_t row_group) {
  constexpr std::uint64_t kSwizzle128 = 1ull << 62;
  const auto field = [](std::uint32_t bytes) { return static_cast<std::uint64_t>((bytes & 0x3ffff) >> 4); };
  return field(address) | field(panel) << 16 | field(row_group) << 32 | kSwizzle128;
}
// The same in fewer instructions, for an address that is known to have no more than the 18 bits that shared memory has.
__device__ inline std::uint64_t brief_matrix_descriptor(std::uint32_t address, std::uint32_t panel,
                                                        std::uint32_t row_group) {
  return matrix_descriptor(0, panel, row_group) | std::uint64_t{address >> 4};
}
// The matrix `bytes` further on.
__device__ inline std::uint64_t advanced(std::uint64_t descriptor, std::uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// Whether a row of B in shared memory is a column of the product (its depth lies along rows, as keys' in Q K^T) or a
// step of the depth (as values' in P V).
enum class BRows { kColumns, kDepth };
// Likewise for A in shared memory: whether a row of it is a row of the product or a step of the depth.
enum class ARows { kRows, kDepth };

// The accumulators' names in the instruction, eight at a time, and as operands.
#define FLASH_DMATTN_D0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FLASH_DMATTN_D1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define FLASH_DMATTN_D2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define FLASH_DMATTN_D3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define FLASH_DMATTN_D4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define FLASH_DMATTN_D5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define FLASH_DMATTN_D6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define FLASH_DMATTN_D7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define FLASH_DMATTN_D8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define FLASH_DMATTN_D9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define FLASH_DMATTN_D10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define FLASH_DMATTN_D11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define FLASH_DMATTN_D12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define FLASH_DMATTN_D13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define FLASH_DMATTN_D14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define FLASH_DMATTN_D15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define FLASH_DMATTN_NAMES_32 FLASH_DMATTN_D0 ", " FLASH_DMATTN_D1
#define FLASH_DMATTN_NAMES_64 FLASH_DMATTN_D0 ", " FLASH_DMATTN_D1 ", " FLASH_DMATTN_D2 ", " FLASH_DMATTN_D3
#define FLASH_DMATTN_NAMES_80 \
  FLASH_DMATTN_D0 ", " FLASH_DMATTN_D1 ", " FLASH_DMATTN_D2 ", " FLASH_DMATTN_D3 ", " FLASH_DMATTN_D4
#define FLASH_DMATTN_NAMES_96                                                                         \
  FLASH_DMATTN_D0 ", " FLASH_DMATTN_D1 ", " FLASH_DMATTN_D2 ", " FLASH_DMATTN_D3 ", " FLASH_DMATTN_D4 \
                  ", " FLASH_DMATTN_D5
#define FLASH_DMATTN_NAMES_112                                                                        \
  FLASH_DMATTN_D0 ", " FLASH_DMATTN_D1 ", " FLASH_DMATTN_D2 ", " FLASH_DMATTN_D3 ", " FLASH_DMATTN_D4 \
                  ", " FLASH_DMATTN_D5 ", " FLASH_DMATTN_D6
#define FLASH_DMATTN_NAMES_128                                                                        \
  FLASH_DMATTN_D0 ", " FLASH_DMATTN_D1 ", " FLASH_DMATTN_D2 ", " FLASH_DMATTN_D3 ", " FLASH_DMATTN_D4 \
                  ", " FLASH_DMATTN_D5 ", " FLASH_DMATTN_D6 ", " FLASH_DMATTN_D7
#define FLASH_DMATTN_NAMES_192                                                                        \
  FLASH_DMATTN_D0 ", " FLASH_DMATTN_D1 ", " FLASH_DMATTN_D2 ", " FLASH_DMATTN_D3 ", " FLASH_DMATTN_D4 \
                  ", " FLASH_DMATTN_D5 ", " FLASH_DMATTN_D6 ", " FLASH_DMATTN_D7 ", " FLASH_DMATTN_D8 \
                  ", " FLASH_DMATTN_D9 ", " FLASH_DMATTN_D10 ", " FLASH_DMATTN_D11
#define FLASH_DMATTN_NAMES_256                                                                           \
  FLASH_DMATTN_D0 ", " FLASH_DMATTN_D1 ", " FLASH_DMATTN_D2 ", " FLASH_DMATTN_D3 ", " FLASH_DMATTN_D4    \
                  ", " FLASH_DMATTN_D5 ", " FLASH_DMATTN_D6 ", " FLASH_DMATTN_D7 ", " FLASH_DMATTN_D8    \
                  ", " FLASH_DMATTN_D9 ", " FLASH_DMATTN_D10 ", " FLASH_DMATTN_D11 ", " FLASH_DMATTN_D12 \
                  ", " FLASH_DMATTN_D13 ", " FLASH_DMATTN_D14 ", " FLASH_DMATTN_D15
#define FLASH_DMATTN_TILE(c, n) c(sum[n][0]), c(sum[n][1]), c(sum[n][2]), c(sum[n][3])
#define FLASH_DMATTN_SUM_32(c) \
  FLASH_DMATTN_TILE(c, 0), FLASH_DMATTN_TILE(c, 1), FLASH_DMATTN_TILE(c, 2), FLASH_DMATTN_TILE(c, 3)
#define FLASH_DMATTN_SUM_64(c)                                                                       \
  FLASH_DMATTN_SUM_32(c), FLASH_DMATTN_TILE(c, 4), FLASH_DMATTN_TILE(c, 5), FLASH_DMATTN_TILE(c, 6), \
      FLASH_DMATTN_TILE(c, 7)
#define FLASH_DMATTN_SUM_80(c) FLASH_DMATTN_SUM_64(c), FLASH_DMATTN_TILE(c, 8), FLASH_DMATTN_TILE(c, 9)
#define FLASH_DMATTN_SUM_96(c) FLASH_DMATTN_SUM_80(c), FLASH_DMATTN_TILE(c, 10), FLASH_DMATTN_TILE(c, 11)
#define FLASH_DMATTN_SUM_112(c) FLASH_DMATTN_SUM_96(c), FLASH_DMATTN_TILE(c, 12), FLASH_DMATTN_TILE(c, 13)
#define FLASH_DMATTN_SUM_128(c) FLASH_DMATTN_SUM_112(c), FLASH_DMATTN_TILE(c, 14), FLASH_DMATTN_TILE(c, 15)
#define FLASH_DMATTN_SUM_192(c)                                                                               \
  FLASH_DMATTN_SUM_128(c), FLASH_DMATTN_TILE(c, 16), FLASH_DMATTN_TILE(c, 17), FLASH_DMATTN_TILE(c, 18),      \
      FLASH_DMATTN_TILE(c, 19), FLASH_DMATTN_TILE(c, 20), FLASH_DMATTN_TILE(c, 21), FLASH_DMATTN_TILE(c, 22), \
      FLASH_DMATTN_TILE(c, 23)
#define FLASH_DMATTN_SUM_256(c)                                                                               \
  FLASH_DMATTN_SUM_192(c), FLASH_DMATTN_TILE(c, 24), FLASH_DMATTN_TILE(c, 25), FLASH_DMATTN_TILE(c, 26),      \
      FLASH_DMATTN_TILE(c, 27), FLASH_DMATTN_TILE(c, 28), FLASH_DMATTN_TILE(c, 29), FLASH_DMATTN_TILE(c, 30), \
      FLASH_DMATTN_TILE(c, 31)
// %a ... %g: the operands after the accumulators. `in_out`: "+f" and 1 to add to these, "=f" and 0 to overwrite them:
// if the compiler took their old values for operands, it would keep registers for them. The ones are signs, then come,
// where they lie in shared memory, whether A and B are transposed.
#define FLASH_DMATTN_WGMMA_SHARED(N, type, in_out, accumulates, a, b, c, d)                                \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulates                                             \
               ", 0;\n"                                                                                    \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" FLASH_DMATTN_NAMES_##N \
               "}, %" #a ", %" #b ", p, 1, 1, %" #c ", %" #d ";\n}\n"                                      \
               : FLASH_DMATTN_SUM_##N(in_out)                                                              \
               : "l"(a_descriptor), "l"(b_descriptor), "n"(kATransposed), "n"(kTransposed))
#define FLASH_DMATTN_WGMMA_REGISTERS(N, type, in_out, accumulates, a, b, c, d, e, f)                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulates                                              \
               ", 0;\n"                                                                                     \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" FLASH_DMATTN_NAMES_##N  \
               "}, {%" #a ", %" #b ", %" #c ", %" #d "}, %" #e ", p, 1, 1, %" #f ";\n}\n"                   \
               : FLASH_DMATTN_SUM_##N(in_out)                                                               \
               : "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3]), "l"(b_descriptor), \
                 "n"(kTransposed))
#define FLASH_DMATTN_WGMMA_TYPED(form, N, ...)         \
  if constexpr (__is_same(Element, __nv_bfloat16)) {   \
    FLASH_DMATTN_WGMMA_##form(N, "bf16", __VA_ARGS__); \
  } else {                                             \
    FLASH_DMATTN_WGMMA_##form(N, "f16", __VA_ARGS__);  \
  }
#define FLASH_DMATTN_WGMMA(form, N, ...)                        \
  if constexpr (kColumns == N) {                                \
    if constexpr (kOverwrites) {                                \
      FLASH_DMATTN_WGMMA_TYPED(form, N, "=f", "0", __VA_ARGS__) \
    } else if (accumulate) {                                    \
      FLASH_DMATTN_WGMMA_TYPED(form, N, "+f", "1", __VA_ARGS__) \
    } else {                                                    \
      FLASH_DMATTN_WGMMA_TYPED(form, N, "+f", "0", __VA_ARGS__) \
    }                                                           \
  }

// One step of depth 16; A is 64 rows. Without `accumulate`, which is known at compile time, the old sum is dropped;
// with kOverwrites the compiler knows that, too, and keeps no registers for it. (Kernels that do without have been
// measured.)
template <typename Element, BRows kB, ARows kA = ARows::kRows, bool kOverwrites = false, int kNTiles>
__device__ inline void wgmma(float (&sum)[kNTiles][4], std::uint64_t a_descriptor, std::uint64_t b_descriptor,
                             bool accumulate) {
  constexpr int kColumns = 8 * kNTiles, kATransposed = kA == ARows::kDepth, kTransposed = kB == BRows::kDepth;
  FLASH_DMATTN_WGMMA(SHARED, 32, 16, 17, 18, 19)
  FLASH_DMATTN_WGMMA(SHARED, 64, 32, 33, 34, 35)
  FLASH_DMATTN_WGMMA(SHARED, 80, 40, 41, 42, 43)
  FLASH_DMATTN_WGMMA(SHARED, 96, 48, 49, 50, 51)
  FLASH_DMATTN_WGMMA(SHARED, 112, 56, 57, 58, 59)
  FLASH_DMATTN_WGMMA(SHARED, 128, 64, 65, 66, 67)
  FLASH_DMATTN_WGMMA(SHARED, 192, 96, 97, 98, 99)
  FLASH_DMATTN_WGMMA(SHARED, 256, 128, 129, 130, 131)
}

// The same with A in registers: `fragment` as mma.cuh has it.
template <typename Element, BRows kB, int kNTiles>
__device__ inline void wgmma(float (&sum)[kNTiles][4], const std::uint32_t (&fragment)[4], std::uint64_t b_descriptor,
                             bool accumulate) {
  constexpr bool kOverwrites = false;
  constexpr int kColumns = 8 * kNTiles, kTransposed = kB == BRows::kDepth;
  FLASH_DMATTN_WGMMA(REGISTERS, 64, 32, 33, 34, 35, 36, 37)
  FLASH_DMATTN_WGMMA(REGISTERS, 80, 40, 41, 42, 43, 44, 45)
  FLASH_DMATTN_WGMMA(REGISTERS, 96, 48, 49, 50, 51, 52, 53)
  FLASH_DMATTN_WGMMA(REGISTERS, 112, 56, 57, 58, 59, 60, 61)
  FLASH_DMATTN_WGMMA(REGISTERS, 128, 64, 65, 66, 67, 68, 69)
  FLASH_DMATTN_WGMMA(REGISTERS, 192, 96, 97, 98, 99, 100, 101)
  FLASH_DMATTN_WGMMA(REGISTERS, 256, 128, 129, 130, 131, 132, 133)
}

#undef FLASH_DMATTN_D0
#undef FLASH_DMATTN_D1
#undef FLASH_DMATTN_D2
#undef FLASH_DMATTN_D3
#undef FLASH_DMATTN_D4
#undef FLASH_DMATTN_D5
#undef FLASH_DMATTN_D6
#undef FLASH_DMATTN_D7
#undef FLASH_DMATTN_D8
#undef FLASH_DMATTN_D9
#undef FLASH_DMATTN_D10
#undef FLASH_DMATTN_D11
#undef FLASH_DMATTN_D12
#undef FLASH_DMATTN_D13
#undef FLASH_DMATTN_D14
#undef FLASH_DMATTN_D15
#undef FLASH_DMATTN_NAMES_32
#undef FLASH_DMATTN_SUM_32
#undef FLASH_DMATTN_NAMES_64
#undef FLASH_DMATTN_SUM_64
#undef FLASH_DMATTN_NAMES_80
#undef FLASH_DMATTN_SUM_80
#undef FLASH_DMATTN_NAMES_96
#undef FLASH_DMATTN_SUM_96
#undef FLASH_DMATTN_NAMES_112
#undef FLASH_DMATTN_SUM_112
#undef FLASH_DMATTN_NAMES_128
#undef FLASH_DMATTN_SUM_128
#undef FLASH_DMATTN_NAMES_192
#undef FLASH_DMATTN_SUM_192
#undef FLASH_DMATTN_NAMES_256
#undef FLASH_DMATTN_SUM_256
#undef FLASH_DMATTN_TILE
#undef FLASH_DMATTN_WGMMA_SHARED
#undef FLASH_DMATTN_WGMMA_REGISTERS
#undef FLASH_DMATTN_WGMMA_TYPED
#undef FLASH_DMATTN_WGMMA

}  // namespace flash_dmattn::internal::cuda
