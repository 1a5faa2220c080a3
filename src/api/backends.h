// Which backend computes a call.
#pragma once

#include <cstddef>
#include <type_traits>

#include "core/backend.h"
#include "flash_dmattn/attention.h"
#include "flash_dmattn/executor.h"
#include "flash_dmattn/selection.h"
#include "flash_dmattn/status.h"

namespace flash_dmattn::internal {

const char* name_of(Device::Kind kind);  // "cpu"

// The backend for elements of this dtype on this device. Not ok if this build was made without it.
Status find_backend(const Device& device, DType dtype, const Backend** backend);

inline CallContext call_of(const AttentionContext& context) {
  return {context.executor, context.counters, context.device.stream};
}
inline CallContext call_of(const SelectionContext& context) {
  return {context.executor, nullptr, context.device.stream};
}

// The bytes that a query of a backend gives: none where it has none.
template <typename Problem>
Status measure(Backend::Query<Problem> query, const std::type_identity_t<Problem>& problem, const CallContext& call,
               std::size_t* bytes) {
  *bytes = 0;
  return query == nullptr ? Status() : query(problem, call, bytes);
}

}  // namespace flash_dmattn::internal
