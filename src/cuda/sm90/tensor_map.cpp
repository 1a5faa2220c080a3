#include "cuda/sm90/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

namespace flash_dmattn::internal::cuda::sm90 {
namespace {

constexpr int kElementBytes = 2, kPieceBytes = 16, kPanelColumns = 64;

// The driver is found when it is needed: a library that links to it would not load without a GPU.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = {};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function)
               : nullptr;
  }();
  return found;
}

}  // namespace

bool has_tensor_map(const TokenView& tokens, std::int64_t batch, std::int64_t count, std::int64_t heads) {
  constexpr std::int64_t kMostStride = (std::int64_t{1} << 40) / kElementBytes;
  const auto fits = [](std::int64_t size, std::int64_t stride) {
    return size <= 1 || (stride > 0 && stride < kMostStride && stride * kElementBytes % kPieceBytes == 0);
  };
  return reinterpret_cast<std::uintptr_t>(tokens.data) % kPieceBytes == 0 && fits(batch, tokens.batch_stride) &&
         fits(count, tokens.token_stride) && fits(heads, tokens.head_stride);
}

cudaError_t make_tensor_map(const TokenView& tokens, DType dtype, std::int64_t batch, std::int64_t count,
                            std::int64_t heads, std::int64_t head_dim, int rows, CUtensorMap* map) {
  const auto encode = encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  // Of a dimension of size 1 the stride does not matter, but has to be one that is allowed.
  const auto bytes_of = [](std::int64_t size, std::int64_t stride) {
    return static_cast<cuuint64_t>(size <= 1 ? kPieceBytes : stride * kElementBytes);
  };
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(count),
                              static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[] = {bytes_of(count, tokens.token_stride), bytes_of(heads, tokens.head_stride),
                                bytes_of(batch, tokens.batch_stride)};
  const cuuint32_t box[] = {kPanelColumns, static_cast<cuuint32_t>(rows), 1, 1}, steps[] = {1, 1, 1, 1};
  const CUtensorMapDataType type =
      dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  // The driver's errors have the runtime's numbers.
  return static_cast<cudaError_t>(encode(map, type, 4, tokens.data, sizes, strides, box, steps,
                                         CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                         CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

}  // namespace flash_dmattn::internal::cuda::sm90
