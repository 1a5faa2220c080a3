// CUDA's runtime: one device, whose work is done when it is asked for, or whenever the graph that captures it is
// launched.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "cudaTypedefs.h"
#include "cuda_runtime_api.h"
#include "execution.h"

struct cudaStream {
  cudaGraph* captured_by = nullptr;
};
struct cudaGraph {
  std::vector<std::function<void()>> nodes;
};

namespace cuda_emulation {
namespace {

constexpr unsigned kMostThreads = 1024;              // of a block
constexpr std::size_t kMostSharedBytes = 227 << 10;  // of compute capability 9.0

unsigned cluster_blocks(const cudaLaunchConfig_t& config) {
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    if (config.attrs[i].id == cudaLaunchAttributeClusterDimension) return config.attrs[i].val.clusterDim.x;
  }
  return 1;
}

// Now, or whenever the graph that captures the stream is launched.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  if (stream != nullptr && stream->captured_by != nullptr) {
    stream->captured_by->nodes.push_back(std::move(work));
  } else {
    work();
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t launch(const cudaLaunchConfig_t& config, std::function<void()> thread) {
  if (config.blockDim.x == 0 || config.blockDim.x > kMostThreads || config.dynamicSmemBytes > kMostSharedBytes) {
    return cudaErrorInvalidConfiguration;
  }
  // The attributes are the caller's, who has left when a graph runs.
  const unsigned blocks = cluster_blocks(config);
  if (config.gridDim.x % blocks != 0) return cudaErrorInvalidConfiguration;
  return enqueue(config.stream, [config, blocks, thread = std::move(thread)] { run(config, blocks, thread); });
}

}  // namespace cuda_emulation

using cuda_emulation::enqueue;
using cuda_emulation::kMostSharedBytes;

const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "emulated error"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  constexpr std::size_t kAlignment = 256;
  return posix_memalign(memory, kAlignment, bytes) == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind /*kind*/) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  return enqueue(stream, [=] { cudaMemcpy(to, from, bytes, kind); });
}
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  return cudaMemsetAsync(memory, value, bytes, nullptr);
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  return enqueue(stream, [=] { std::memset(memory, value, bytes); });
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
// A small Hopper: blocks that stay for many works have some.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  constexpr int kProcessors = 4;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(kMostSharedBytes);
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = kProcessors;
      break;
  }
  return cudaSuccess;
}

static int encode_tensor_map(CUtensorMap* map, CUtensorMapDataType /*type*/, cuuint32_t /*rank*/, void* data,
                             const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                             const cuuint32_t* /*steps*/, CUtensorMapInterleave /*interleave*/,
                             CUtensorMapSwizzle /*swizzle*/, CUtensorMapL2promotion /*promotion*/,
                             CUtensorMapFloatOOBfill /*fill*/) {
  map->data = static_cast<unsigned char*>(data);
  std::copy_n(sizes, 4, map->sizes);
  std::copy_n(strides, 3, map->strides);
  std::copy_n(box, 4, map->box);
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* /*name*/, void** function, unsigned /*version*/,
                                             unsigned long long /*flags*/, cudaDriverEntryPointQueryResult* result) {
  *function = reinterpret_cast<void*>(&encode_tensor_map);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void* /*kernel*/, cudaFuncAttribute /*attribute*/, int /*value*/) {
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new cudaStream;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  stream->captured_by = new cudaGraph;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = stream->captured_by;
  stream->captured_by = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long /*flags*/) {
  *executable = new cudaGraph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t /*stream*/) {
  for (const auto& node : executable->nodes) node();
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return cudaGraphDestroy(executable); }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
