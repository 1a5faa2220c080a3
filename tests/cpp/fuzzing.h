// What the entry points of libFuzzer share.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace flash_dmattn::testing {

// Turns the input into decisions; past its end everything is 0.
class Decisions {
 public:
  Decisions(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}

  std::uint8_t byte() { return position_ < size_ ? data_[position_++] : 0; }
  bool rarely() { return byte() % 32 == 1; }
  template <typename T>
  T raw() {
    T value{};
    const std::size_t count = std::min(sizeof(T), size_ - position_);
    if (count > 0) std::memcpy(&value, data_ + position_, count);
    position_ += count;
    return value;
  }

 private:
  const std::uint8_t* data_;
  std::size_t size_, position_ = 0;
};

}  // namespace flash_dmattn::testing
