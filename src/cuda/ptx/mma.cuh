// The tensor core product of 16-bit types and what its operands need. Runs on sm_80 and later.
//
// Fragments of a 16x16 A (rows x depth), a 16x8 B (depth x columns) and a 16x8 sum: lane l holds
//   sum[0], sum[1]: row l / 4,     columns 2 * (l % 4) and the next
//   sum[2], sum[3]: row l / 4 + 8, the same columns
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flash_dmattn::internal::cuda {

// sum += a b
template <typename Element>
__device__ inline void multiply(float (&sum)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  if constexpr (sizeof(Element) == 2 && __is_same(Element, __nv_bfloat16)) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, "
        "%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Of an 8x8 matrix of 16-bit elements, of which lane l holds two neighbours of row l / 4, the transposed one.
__device__ inline std::uint32_t transposed_matrix(std::uint32_t pair) {
  std::uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

}  // namespace flash_dmattn::internal::cuda
