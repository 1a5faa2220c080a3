// Dynamic selection on the host: one pass over the keys with a heap of the live ones.
#pragma once

#include <cstddef>
#include <cstdint>

#include "flash_dmattn/executor.h"
#include "flash_dmattn/tensor.h"

namespace flash_dmattn::internal {

struct SelectionProblem {
  std::int64_t batch = 0, heads = 0, keys = 0, rows = 0, window = 0;
  bool causal = true;
  const void* scores = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t score_strides[3] = {};  // batch, head, key; in elements
  const std::uint8_t* key_mask = nullptr;
  std::int64_t mask_strides[3] = {};  // 0 where broadcast
  const std::int32_t* seqlens = nullptr;
  std::int64_t seqlens_stride = 0;
  std::int32_t *begin = nullptr, *end = nullptr;  // contiguous (batch, heads, keys)
};

std::size_t selection_workspace(const SelectionProblem&, const Executor&);
void select_on_host(const SelectionProblem&, void* workspace, Executor&);

}  // namespace flash_dmattn::internal
