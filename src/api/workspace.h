// Checks and allocates the scratch memory of public calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>

#include "flash_dmattn/executor.h"
#include "flash_dmattn/status.h"
#include "flash_dmattn/tensor.h"

namespace flash_dmattn::internal {

inline Status check_memory(const char* name, const void* memory, std::size_t bytes, std::size_t needed) {
  if (needed == 0) return Status();
  const bool aligned = reinterpret_cast<std::uintptr_t>(memory) % kMemoryAlignment == 0;
  if (memory != nullptr && aligned && bytes >= needed) return Status();
  return Status::invalid(
      name, "must hold " + std::to_string(needed) + " bytes, aligned to " + std::to_string(kMemoryAlignment),
      memory == nullptr ? "null" : std::to_string(bytes) + " bytes" + (aligned ? "" : ", not aligned"));
}

inline Status check_workspace(const void* workspace, std::size_t bytes, std::size_t needed) {
  return check_memory("workspace", workspace, bytes, needed);
}

inline Status check_own_workspace(const Device& device) {
  if (!device.is_cuda()) return Status();
  return Status::invalid("workspace", "must be given on CUDA, where no call allocates", "none");
}

// Scratch memory for the duration of one call.
class OwnWorkspace {
 public:
  explicit OwnWorkspace(std::size_t bytes)
      : bytes_(bytes),
        memory_(bytes == 0 ? nullptr : ::operator new(bytes, std::align_val_t{kMemoryAlignment}, std::nothrow)) {}
  ~OwnWorkspace() { ::operator delete(memory_, std::align_val_t{kMemoryAlignment}); }
  OwnWorkspace(const OwnWorkspace&) = delete;
  OwnWorkspace& operator=(const OwnWorkspace&) = delete;

  // Whether there was enough memory to be had.
  Status status() const {
    if (bytes_ == 0 || memory_ != nullptr) return Status();
    return Status::failed("allocation", std::to_string(bytes_) + " bytes of workspace asked for, out of memory");
  }
  void* get() const { return memory_; }

 private:
  std::size_t bytes_;
  void* memory_;
};

}  // namespace flash_dmattn::internal
