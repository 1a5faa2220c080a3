// What every public call does beside its work: it checks where to run and where results go, and lets no exception out.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "flash_dmattn/executor.h"
#include "flash_dmattn/status.h"

namespace flash_dmattn::internal {

inline Status check_device(const Device& device) {
  if (device.kind == Device::Kind::kCpu || device.kind == Device::Kind::kCuda) return Status();
  return Status::invalid("device.kind", "must be kCpu or kCuda",
                         "device.kind " + std::to_string(static_cast<int>(device.kind)));
}

// `result`: where the caller wants the argument of this name written.
inline Status check_call(const Device& device, const char* name, const void* result) {
  if (result == nullptr) return Status::invalid(name, "must point to where the result goes", "null");
  return check_device(device);
}

// Of an exception that ended a call: memory ran out, or an Executor of the caller's threw. Where memory ran out this
// allocates nothing, since strings as short as these need no memory of their own.
inline Status status_of_exception(const std::exception& error) {
  const bool out_of_memory = dynamic_cast<const std::bad_alloc*>(&error) != nullptr ||
                             dynamic_cast<const std::length_error*>(&error) != nullptr;  // of a vector
  return out_of_memory ? Status::failed("allocation", "out of memory") : Status::failed("call", error.what());
}

}  // namespace flash_dmattn::internal
