// Packed documents, read from bounds that may hold anything.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.h"

namespace flash_dmattn::internal {

// Neighbouring rows, and neighbouring keys that these alone see. The causal rule is aligned to the ends of both.
struct Document {
  std::int64_t row_begin = 0, row_end = 0, key_begin = 0, key_end = 0;

  // The first row that sees a key of the document, which has rows.
  std::int64_t first_row(std::int64_t key, bool causal) const {
    return causal ? std::max(row_end - (key_end - key), row_begin) : row_begin;
  }
};

// Reads documents one after the other. Bounds are clamped to the rows and keys that there are, and none is taken for
// less than those before it.
class DocumentReader {
 public:
  DocumentReader(const DocumentBounds& row_bounds, const DocumentBounds& key_bounds, std::int64_t batch,
                 std::int64_t rows, std::int64_t keys)
      : rows_(row_bounds, batch, rows), keys_(key_bounds, batch, keys) {}

  Document next() {
    const std::int64_t row_begin = rows_.last, key_begin = keys_.last;
    return {row_begin, rows_.advance(), key_begin, keys_.advance()};
  }

 private:
  struct Cursor {
    Cursor(const DocumentBounds& bounds, std::int64_t batch, std::int64_t length)
        : at(bounds.data + batch * bounds.batch_stride), stride(bounds.stride), length(length) {
      last = std::clamp<std::int64_t>(*at, 0, length);
    }

    std::int64_t advance() {
      at += stride;
      return last = std::clamp<std::int64_t>(*at, last, length);
    }

    const std::int32_t* at;
    std::int64_t stride, length, last = 0;
  };
  Cursor rows_, keys_;
};

}  // namespace flash_dmattn::internal
