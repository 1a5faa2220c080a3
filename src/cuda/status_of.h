// What the CUDA runtime answers, as a Status.
#pragma once

#include <cuda_runtime_api.h>

#include "flash_dmattn/status.h"

namespace flash_dmattn::internal::cuda {

inline Status status_of(cudaError_t error) {
  if (error == cudaSuccess) return Status();
  // The caller is told. The runtime would tell once more whoever asks for its last error next, of a call of their own.
  static_cast<void>(cudaGetLastError());
  return Status::failed("CUDA", cudaGetErrorString(error));
}

}  // namespace flash_dmattn::internal::cuda
