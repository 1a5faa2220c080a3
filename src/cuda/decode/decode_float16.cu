#include "cuda/decode/decode.cuh"

namespace flash_dmattn::internal::cuda {
template cudaError_t launch_decode_kernels<__half, 32>(const DecodeParams&, cudaStream_t);
template cudaError_t launch_decode_kernels<__half, 64>(const DecodeParams&, cudaStream_t);
template cudaError_t launch_decode_kernels<__half, 96>(const DecodeParams&, cudaStream_t);
template cudaError_t launch_decode_kernels<__half, 128>(const DecodeParams&, cudaStream_t);
template cudaError_t launch_decode_kernels<__half, 192>(const DecodeParams&, cudaStream_t);
template cudaError_t launch_decode_kernels<__half, 256>(const DecodeParams&, cudaStream_t);
}  // namespace flash_dmattn::internal::cuda
