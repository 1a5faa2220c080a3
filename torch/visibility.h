// What a call lets each query see, as the operators take it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "tensors.h"

namespace flash_dmattn::operators {

// The fields of Visibility in python/flash_dmattn/_visibility.py, which documents them.
struct VisibilityArguments {
  std::optional<Tensor> mask, seqlens_k, interval_begin, interval_end, indices, index_lengths;
  bool is_causal = false;
  std::int64_t interval_window = 0, index_block_size = 1;
  std::optional<Tensor> plan{};  // last, since operators that make a plan are given none

  // By the names that callers know.
  std::array<NamedTensor, 7> tensors() const {
    return {{{"mask", mask},
             {"seqlens_k", seqlens_k},
             {"intervals.begin", interval_begin},
             {"intervals.end", interval_end},
             {"indices", indices},
             {"indices.lengths", index_lengths},
             {"plan", plan}}};
  }
};

// The same in a schema, side by side in every operator that takes them, and tensors first, as Python's rules expect.
inline std::string visibility_schema(bool with_plan) {
  return std::string(
             "Tensor? mask, Tensor? seqlens_k, Tensor? interval_begin, Tensor? interval_end, Tensor? indices, "
             "Tensor? index_lengths, ") +
         (with_plan ? "Tensor? plan, " : "") + "bool is_causal, SymInt interval_window, SymInt index_block_size";
}

}  // namespace flash_dmattn::operators
