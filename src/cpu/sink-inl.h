// Sinks: a sink is a score without a key in the softmax sum of each of its head's rows. It changes facts of a row and
// no more: the keys share the sum with it, so that out and its gradient shrink, while lse leaves it out. In double
// precision, since where scores are large the sink's distance from them is what counts.
#pragma once

#include <cmath>
#include <limits>

namespace flash_dmattn::internal::cpu {
namespace {

// A row's softmax sum relative to the maximum of its keys' scores, once the sink is in it. NaN if the sink is NaN or
// +inf.
inline double sum_with_sink(double sink, double maximum, double sum) {
  if (sink == std::numeric_limits<double>::infinity()) return std::numeric_limits<double>::quiet_NaN();
  return sum + std::exp(sink - maximum);
}

// What the keys and the sink have of that sum. Of the sink by itself, since 1 less the keys' would lose small ones.
struct SinkShares {
  double keys = 1, sink = 0;
};

inline SinkShares shares_of_sum(double sink, double maximum, double log_sum) {
  if (sink == std::numeric_limits<double>::infinity()) sink = std::numeric_limits<double>::quiet_NaN();
  const double distance = sink - maximum - log_sum;
  return {1 / (1 + std::exp(distance)), 1 / (1 + std::exp(-distance))};  // an exponential beyond any double makes 0
}

}  // namespace
}  // namespace flash_dmattn::internal::cpu
