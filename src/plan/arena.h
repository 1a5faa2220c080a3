// Splits one block of caller-provided memory into aligned arrays. The same code that takes the arrays
// measures how much is needed, when run on a null block.
#pragma once

#include <cstddef>

namespace flash_dmattn::internal {

class Arena {
 public:
  static constexpr std::size_t kAlignment = 64;  // a cache line, and the widest vector

  explicit Arena(void* block) : block_(static_cast<std::byte*>(block)) {}

  // `count` elements of T, uninitialised; null when measuring.
  template <typename T>
  T* take(std::size_t count) {
    T* result = block_ == nullptr ? nullptr : reinterpret_cast<T*>(block_ + used_);
    used_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return result;
  }

  // The next array begins at a multiple of `bytes` of the block, itself a multiple of kAlignment.
  void align(std::size_t bytes) { used_ = (used_ + bytes - 1) / bytes * bytes; }

  std::size_t used() const { return used_; }

 private:
  std::byte* block_;
  std::size_t used_ = 0;
};

}  // namespace flash_dmattn::internal
