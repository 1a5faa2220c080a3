// CUDA without a GPU: kernels, compiled by the C++ compiler and run on the CPU, so that their logic is tested
// everywhere and under AddressSanitizer. This stands in for the CUDA toolkit's header of the same name; emulation.h is
// what kernels see beside it, and cuda/ptx stands in for the instructions that kernels name (src/cuda/ptx).
//
// Blocks run one after another, in an order of chance, those of a cluster by turns. Each thread of a block is a fiber:
// it runs until it meets a barrier or a function of its warp, and the one that goes on then is chosen by chance, too,
// so that a missing barrier shows. What the GPU does beside threads, copies and Hopper's products, is done at any time
// before it is waited for. What differs from a GPU: fibers switch only there (races between neighbouring instructions
// do not show), memory is that of a sequentially consistent machine (nor does a missing fence), and nothing can be told
// about time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <tuple>

#include "vector_types.h"

constexpr int CUDART_VERSION = 13000;

enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorMemoryAllocation,
  cudaErrorInvalidConfiguration,
  cudaErrorNotSupported,
};
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

// Device memory is host memory, of exactly the bytes asked for.
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
struct cudaStream;
using cudaStream_t = cudaStream*;
cudaError_t cudaMalloc(void** memory, std::size_t bytes);
template <typename T>
cudaError_t cudaMalloc(T** memory, std::size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(memory), bytes);
}
cudaError_t cudaFree(void* memory);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes);
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream);

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaDeviceSynchronize();
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMultiProcessorCount,
};
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);

// The driver has one function: it makes tensor maps (cudaTypedefs.h).
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
constexpr unsigned long long cudaEnableDefault = 0;
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult* result);

// A stream does its work at once, unless it is captured: then a graph keeps it.
struct cudaGraph;
using cudaGraph_t = cudaGraph*;
using cudaGraphExec_t = cudaGraph*;
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal };
cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);

struct cudaFuncAttributes {
  int ptxVersion = 90;
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize,
  cudaFuncAttributeNonPortableClusterSizeAllowed,
};
template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel* /*kernel*/) {
  *attributes = {};
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);

enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension,
  cudaLaunchAttributeClusterSchedulingPolicyPreference,
};
enum cudaClusterSchedulingPolicy { cudaClusterSchedulingPolicyLoadBalancing };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
    cudaClusterSchedulingPolicy clusterSchedulingPolicyPreference;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

namespace cuda_emulation {
cudaError_t launch(const cudaLaunchConfig_t& config, std::function<void()> thread);
}

template <typename... Expected, typename... Actual>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Expected...), const Actual&... values) {
  return cuda_emulation::launch(*config,
                                [kernel, copies = std::tuple<Expected...>(values...)] { std::apply(kernel, copies); });
}
