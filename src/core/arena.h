// Splits one block of memory, which begins aligned, into aligned arrays. The same code that takes the arrays
// measures how much is needed, when run on a null block.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/tensor.h"

namespace flash_dmattn::internal {

// Bytes that an array takes, since the next one begins aligned.
constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + kMemoryAlignment - 1) / kMemoryAlignment * kMemoryAlignment;
}

class Arena {
 public:
  explicit Arena(void* block) : block_(static_cast<std::byte*>(block)) {}

  // `count` elements of T, uninitialised; null when measuring.
  template <typename T>
  T* take(std::size_t count) {
    T* result = block_ == nullptr ? nullptr : reinterpret_cast<T*>(block_ + used_);
    used_ += aligned(count * sizeof(T));
    return result;
  }

  // The same at an address that is a multiple of `alignment`, itself one of kMemoryAlignment. How much that uses does
  // not depend on what was taken before.
  template <typename T>
  T* take_aligned(std::size_t count, std::size_t alignment) {
    std::byte* memory = take<std::byte>(count * sizeof(T) + alignment - kMemoryAlignment);
    if (memory == nullptr) return nullptr;
    const std::size_t excess = reinterpret_cast<std::uintptr_t>(memory) % alignment;
    return reinterpret_cast<T*>(memory + (excess == 0 ? 0 : alignment - excess));
  }

  std::size_t used() const { return used_; }

 private:
  std::byte* block_;
  std::size_t used_ = 0;
};

}  // namespace flash_dmattn::internal
