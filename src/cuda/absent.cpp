// What stands in for the CUDA backend in a build that has none.
#include "cuda/backend.h"
#include "flash_dmattn/info.h"

namespace flash_dmattn::internal::cuda {

constinit const Backend kBackend = {};  // not defined()

}  // namespace flash_dmattn::internal::cuda

namespace flash_dmattn {

CudaInfo cuda_info() { return {}; }
std::string cuda_kernels(int, int) { return "none"; }

}  // namespace flash_dmattn
