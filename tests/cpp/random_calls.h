// Calls of attention of every kind, by chance, and a look at their results that finds what is wrong.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "attention_testing.h"
#include "fuzzing.h"

namespace flash_dmattn::testing {

// A shape of the form (B, heads, Sq, Sk), (B, heads, Sk) or (Sq, Sk), any of its sizes 1; empty: none.
inline std::vector<std::int64_t> broadcast_shape(Decisions& decisions, const Shape& s) {
  const auto one_or = [&](std::int64_t full) { return decisions.byte() % 2 ? 1 : full; };
  const std::int64_t heads = one_or(decisions.byte() % 2 ? s.heads : s.key_heads);
  switch (decisions.byte() % 5) {
    case 0:
      return {one_or(s.rows), one_or(s.keys)};
    case 1:
      return {one_or(s.batch), heads, one_or(s.keys)};
    case 2:
      return {one_or(s.batch), heads, one_or(s.rows), one_or(s.keys)};
    default:
      return {};
  }
}

// What make_variant chooses from.
struct RandomSizes {
  std::vector<std::int64_t> row_counts, key_counts;  // in a quarter of the calls
  int most_rows, most_keys;                          // in the others, up to 255
  std::vector<std::int64_t> head_dims, value_dims;   // values have another head dim in half of the calls
  int most_entries;                                  // of a list
};

inline Variant make_variant(Decisions& decisions, const RandomSizes& sizes) {
  const auto chosen = [&](const std::vector<std::int64_t>& values) { return values[decisions.byte() % values.size()]; };
  const auto up_to = [&](int most) { return decisions.byte() % (most + 1); };
  const auto some = [&] { return decisions.byte() % 2 == 1; };
  Variant variant;
  Shape& s = variant.shape;
  s.batch = chosen({1, 1, 2});
  s.rows = decisions.byte() % 4 == 0 ? chosen(sizes.row_counts) : up_to(sizes.most_rows);
  s.keys = decisions.byte() % 4 == 0 ? chosen(sizes.key_counts) : up_to(sizes.most_keys);
  s.key_heads = chosen({1, 2});
  s.heads = s.key_heads * chosen({1, 2, 3});
  s.head_dim = chosen(sizes.head_dims);
  s.value_dim = some() ? s.head_dim : chosen(sizes.value_dims);
  variant.is_causal = some();
  variant.softcap = decisions.rarely() ? 2.0 : 0.0;
  variant.density = decisions.byte() / 255.0;
  variant.mask = broadcast_shape(decisions, s);
  variant.bias = broadcast_shape(decisions, s);
  variant.float_bias = some();
  variant.sink = some();
  variant.float_sink = variant.sink && some();
  if (some()) {
    for (std::int64_t b = 0; b < s.batch; ++b) variant.seqlens.push_back(decisions.byte() % (s.keys + 2) - 1);
  }
  const auto of_heads = [&] { return chosen({1, s.key_heads, s.heads}); };
  if (some()) variant.intervals = {some() ? 1 : s.batch, of_heads(), s.keys};
  if (some()) {
    variant.indices = {some() ? 1 : s.batch, of_heads(), some() ? 1 : s.rows, up_to(sizes.most_entries)};
    variant.has_lengths = some();
    variant.block_size = chosen({1, 1, 3, 64, 100});
  }
  return variant;
}

// Far above rounding: what is wrong by more was computed from other numbers.
inline double coarse_tolerance(DType dtype) {
  return dtype == DType::kFloat32 ? 1e-3 : dtype == DType::kFloat16 ? 3e-2 : dtype == DType::kBFloat16 ? 0.2 : 1e-9;
}

// Where results differ from those of float64 by more, in words, or nothing.
inline std::string first_difference(const Call& got, const Call& expected) {
  const auto left = got.results(), right = expected.results();
  for (std::size_t i = 0; i < left.size(); ++i) {
    const Tensor &ours = *left[i].second, &reference = *right[i].second;
    // The coarser of the dtypes that it was computed in and rounded to.
    const double allowed = std::max(coarse_tolerance(got.query.dtype()), coarse_tolerance(ours.dtype()));
    double largest = std::max(1.0, 0.3 * std::sqrt(summands_of(left[i].first, got)));
    for (std::size_t at = 0; at < reference.count(); ++at) {
      if (std::isfinite(reference.get(at))) largest = std::max(largest, std::fabs(reference.get(at)));
    }
    for (std::size_t at = 0; at < reference.count(); ++at) {
      const double difference = std::fabs(ours.get(at) - reference.get(at));
      if (ours.get(at) == reference.get(at) || difference <= allowed * largest) continue;
      return std::string(name_of(got.query.dtype())) + " " + left[i].first + "[" + std::to_string(at) + "] is " +
             std::to_string(ours.get(at)) + ", float64's " + std::to_string(reference.get(at));
    }
  }
  return {};
}

}  // namespace flash_dmattn::testing
