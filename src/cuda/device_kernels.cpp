#include "cuda/device_kernels.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <sstream>
#include <string>

#include "cuda/attention/params.h"
#include "cuda/kernel_family.h"
#include "cuda/status_of.h"
#include "flash_dmattn/info.h"

namespace flash_dmattn {
namespace {

constexpr int kLeastCapability = 80;  // mma.sync of bfloat16, cp.async

// One of CMake's architectures: "90-real" is machine code, which GPUs of the same major version and no lower minor one
// run; "80-virtual" is PTX, which the driver compiles for all later GPUs; "80" is both. Letters ("90a") bind it to one.
bool runs(const std::string& architecture, int capability) {
  char* rest = nullptr;
  const int compiled = static_cast<int>(std::strtol(architecture.c_str(), &rest, 10));
  const std::string suffix = rest;
  if (!suffix.empty() && suffix[0] != '-') return compiled == capability;
  const bool machine_code = suffix != "-virtual", ptx = suffix != "-real";
  return (machine_code && compiled / 10 == capability / 10 && compiled <= capability) ||
         (ptx && compiled <= capability);
}

}  // namespace

CudaInfo cuda_info() {
  CudaInfo info;
  info.toolkit = CUDART_VERSION;
  std::istringstream names(FLASH_DMATTN_CUDA_ARCHITECTURES);
  for (std::string name; names >> name;) info.architectures.push_back(name);
  return info;
}

std::string cuda_kernels(int major, int minor) {
  const int capability = 10 * major + minor;
  if (capability < kLeastCapability) return "none";
#ifdef FLASH_DMATTN_SM90
  if (capability == 90) return internal::cuda::kSm90Family.name;
#endif
  for (const std::string& architecture : cuda_info().architectures) {
    if (runs(architecture, capability)) return internal::cuda::kSm80Family.name;
  }
  return "none";
}

namespace internal::cuda {
namespace {

// What is known of the first devices is kept: asking the runtime costs more.
constexpr std::size_t kRemembered = 64;
std::array<std::atomic<bool>, kRemembered> known_to_run;

// Bytes of shared memory that a block may have. CUDA C++ Programming Guide, "Technical Specifications per Compute
// Capability".
std::size_t shared_bytes_of(int capability) {
  switch (capability) {
    case 80:
    case 87:
      return 163 * 1024;
    case 90:
    case 100:
    case 103:
    case 110:
      return kWideSharedBytes;
    default:
      return kLeastSharedBytes;
  }
}

Status judge(int device, bool* runs) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (error != cudaSuccess) return status_of(error);
  *runs = cuda_kernels(major, minor) != "none";
  if (*runs) return {};
  std::string compiled;
  for (const std::string& name : cuda_info().architectures) compiled += (compiled.empty() ? "" : ", ") + name;
  return Status::invalid("device", "must be a GPU that this build has kernels for (" + compiled + ", from 8.0 on)",
                         "cuda:" + std::to_string(device) + " of compute capability " + std::to_string(major) + "." +
                             std::to_string(minor));
}

// The most of a GPU that FLASH_DMATTN_ARCH lets be used. "sm_86": what a GPU of that compute capability has. "sm80", or
// "portable" as it was called before: the kernels of that family, with all the memory that there is.
struct Most {
  int capability = std::numeric_limits<int>::max();
  std::size_t shared_limit = std::numeric_limits<std::size_t>::max();
};

Most most_by_environment() {
  const char* name = std::getenv("FLASH_DMATTN_ARCH");
  if (name == nullptr) return {};
  const std::string arch = name;
  if (arch == "portable" || arch == kSm80Family.name) return {.capability = 80};
  int capability = 0, end = 0;
  if (std::sscanf(name, "sm_%d%n", &capability, &end) != 1 || name[end] != '\0' || capability < kLeastCapability) {
    std::fprintf(stderr, "flash_dmattn: FLASH_DMATTN_ARCH=%s names no kernels of this build; it is ignored\n", name);
    return {};
  }
  return {.capability = capability, .shared_limit = shared_bytes_of(capability)};
}

Gpu ask_runtime(int device) {
  Gpu gpu;
  const auto ask = [device](cudaDeviceAttr attribute, int otherwise) {
    int value = 0;
    return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess ? value : otherwise;
  };
  gpu.capability = 10 * ask(cudaDevAttrComputeCapabilityMajor, 8) + ask(cudaDevAttrComputeCapabilityMinor, 0);
  gpu.shared_limit =
      static_cast<std::size_t>(ask(cudaDevAttrMaxSharedMemoryPerBlockOptin, static_cast<int>(kLeastSharedBytes)));
  gpu.processors = ask(cudaDevAttrMultiProcessorCount, 1);
  static const Most most = most_by_environment();
  gpu.capability = std::min(gpu.capability, most.capability);
  gpu.shared_limit = std::min(gpu.shared_limit, most.shared_limit);
  return gpu;
}

}  // namespace

Gpu current_gpu() {
  static std::array<std::once_flag, kRemembered> asked;
  static std::array<Gpu, kRemembered> known;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return {};
  const auto index = static_cast<std::size_t>(device);
  if (index >= kRemembered) return ask_runtime(device);
  std::call_once(asked[index], [&] { known[index] = ask_runtime(device); });
  return known[index];
}

Status check_current_device() {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return status_of(error);
  const auto index = static_cast<std::size_t>(device);
  if (index < kRemembered && known_to_run[index].load(std::memory_order_relaxed)) return {};
  bool runs = false;
  Status status = judge(device, &runs);
  if (runs && index < kRemembered) known_to_run[index].store(true, std::memory_order_relaxed);
  return status;
}

}  // namespace internal::cuda
}  // namespace flash_dmattn
