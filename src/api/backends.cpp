#include "api/backends.h"

#include <optional>

#include "cpu/backend.h"
#include "cuda/backend.h"

namespace flash_dmattn::internal {
namespace {

struct Entry {
  Device::Kind kind;
  std::optional<DType> dtype;  // none: all others
  const Backend* backend;
};

// The first that fits is taken.
constexpr Entry kBackends[] = {
    {Device::Kind::kCpu, DType::kFloat64, &cpu::kFloat64Backend},
    {Device::Kind::kCpu, {}, &cpu::kBackend},
    {Device::Kind::kCuda, {}, &cuda::kBackend},
};

}  // namespace

const char* name_of(Device::Kind kind) { return kind == Device::Kind::kCuda ? "cuda" : "cpu"; }

Status find_backend(const Device& device, DType dtype, const Backend** backend) {
  for (const Entry& entry : kBackends) {
    if (entry.kind != device.kind || entry.dtype.value_or(dtype) != dtype || !entry.backend->defined()) continue;
    *backend = entry.backend;
    return {};
  }
  // The CPU's are part of every build.
  return Status::invalid("device", "must be one that this build has kernels for (it was built without CUDA)",
                         name_of(device.kind));
}

}  // namespace flash_dmattn::internal
