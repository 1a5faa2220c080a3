// When keys come: of a sequence whose rows all see the same one, and of packed documents.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace flash_dmattn::internal::cuda {

// Where a key stands.
struct Arrival {
  std::int32_t document;            // -1: the key does not exist, or no row can see it
  std::int32_t first_row, end_row;  // the rows that see it if it is kept and never evicted

  __device__ bool exists() const { return document >= 0; }
};

// The keys of a batch element, as one document.
struct Arrivals {
  std::int64_t existing, history, rows;
  bool causal;

  __device__ Arrivals(const SelectionProblem& problem, const std::int32_t*, std::int64_t batch)
      : existing(problem.keys), rows(problem.rows), causal(problem.causal) {
    if (problem.seqlens != nullptr) {
      const std::int64_t length = problem.seqlens[batch * problem.seqlens_stride];
      existing = length < 0 ? 0 : length < existing ? length : existing;
    }
    history = existing - problem.rows;
  }

  __device__ Arrival of(std::int64_t key) const {
    return {key < existing ? 0 : -1, first_row(0, key), static_cast<std::int32_t>(rows)};
  }
  __device__ std::int32_t first_row(int, std::int64_t key) const {
    return causal && key > history ? static_cast<std::int32_t>(key - history) : 0;
  }
};

// The same of packed documents, whose `bounds` clamp_bounds (device_selection.cu) has written.
struct PackedArrivals {
  const std::int32_t *row_bounds, *key_bounds;  // (documents + 1), ascending
  std::int32_t documents;
  bool causal;

  __device__ PackedArrivals(const SelectionProblem& problem, const std::int32_t* bounds, std::int64_t batch)
      : row_bounds(bounds + 2 * batch * (problem.documents + 1)),
        key_bounds(row_bounds + problem.documents + 1),
        documents(static_cast<std::int32_t>(problem.documents)),
        causal(problem.causal) {}

  __device__ Arrival of(std::int64_t key) const {
    // The last document that begins at the key or before has it, unless it ends before: documents without keys between
    // begin where that one does.
    std::int32_t first = 0, count = documents + 1;  // of the bounds that may be the first above the key
    while (count > 0) {
      const std::int32_t half = count / 2;
      if (key_bounds[first + half] <= key) {
        first += half + 1;
        count -= half + 1;
      } else {
        count = half;
      }
    }
    const std::int32_t document = first - 1;
    if (document < 0 || document == documents || row_bounds[document] == row_bounds[document + 1]) return {-1, 0, 0};
    return {document, first_row(document, key), row_bounds[document + 1]};
  }
  // Aligned to the ends of the document's rows and keys under the causal rule.
  __device__ std::int32_t first_row(int document, std::int64_t key) const {
    const std::int32_t begin = row_bounds[document];
    if (!causal) return begin;
    return max(begin, row_bounds[document + 1] - (key_bounds[document + 1] - static_cast<std::int32_t>(key)));
  }
};

}  // namespace flash_dmattn::internal::cuda
