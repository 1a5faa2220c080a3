#include "cuda/decode/decode.cuh"

namespace flash_dmattn::internal::cuda {
template cudaError_t launch_decode_kernels<__nv_bfloat16, 32>(const DecodeParams&, cudaStream_t);
template cudaError_t launch_decode_kernels<__nv_bfloat16, 64>(const DecodeParams&, cudaStream_t);
template cudaError_t launch_decode_kernels<__nv_bfloat16, 96>(const DecodeParams&, cudaStream_t);
template cudaError_t launch_decode_kernels<__nv_bfloat16, 128>(const DecodeParams&, cudaStream_t);
template cudaError_t launch_decode_kernels<__nv_bfloat16, 192>(const DecodeParams&, cudaStream_t);
template cudaError_t launch_decode_kernels<__nv_bfloat16, 256>(const DecodeParams&, cudaStream_t);
}  // namespace flash_dmattn::internal::cuda
