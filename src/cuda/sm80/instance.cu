// One of the attention launchers, for one element type and pair of buckets, of keys and of values: cmake/cuda.cmake
// compiles this file once for each.
#include "cuda/sm80/launch_attention.cuh"

namespace flash_dmattn::internal::cuda {

template cudaError_t FLASH_DMATTN_LAUNCHER<FLASH_DMATTN_ELEMENT, FLASH_DMATTN_HEAD_DIM, FLASH_DMATTN_VALUE_DIM>(
    const FLASH_DMATTN_PARAMS&, bool, cudaStream_t);

}  // namespace flash_dmattn::internal::cuda
