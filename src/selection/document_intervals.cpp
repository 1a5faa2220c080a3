#include "selection/document_intervals.h"

#include <algorithm>

#include "selection/documents.h"

namespace flash_dmattn::internal {

void write_document_intervals(const DocumentIntervalsProblem& problem) {
  std::fill_n(problem.begin, problem.keys, 0);
  std::fill_n(problem.end, problem.keys, 0);
  DocumentReader reader(problem.row_bounds, problem.key_bounds, 0, problem.rows, problem.keys);
  for (std::int64_t n = 0; n < problem.documents; ++n) {
    const Document document = reader.next();
    if (document.row_begin == document.row_end) continue;
    for (std::int64_t key = document.key_begin; key < document.key_end; ++key) {
      problem.begin[key] = static_cast<std::int32_t>(document.first_row(key, problem.causal));
      problem.end[key] = static_cast<std::int32_t>(document.row_end);
    }
  }
}

}  // namespace flash_dmattn::internal
