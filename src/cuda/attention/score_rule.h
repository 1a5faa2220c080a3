// How a call's options become the numbers that kernels make scores with.
#pragma once

#include <algorithm>
#include <limits>

#include "cuda/attention/params.h"

namespace flash_dmattn::internal::cuda {

inline ScoreRule score_rule_of(double scale, double softcap, bool has_bias) {
  constexpr double kLog2OfE = 1.4426950408889634;
  ScoreRule rule;
  rule.scale = rule.outer_scale = static_cast<float>(scale);
  if (softcap > 0) {
    constexpr double kMost = std::numeric_limits<float>::max();  // 0 times infinity would be NaN
    rule.softcap = static_cast<float>(softcap);
    rule.outer_scale = 1;
    rule.inverse_softcap = static_cast<float>(1 / softcap);
    rule.inner_scale = static_cast<float>(std::clamp(2 * kLog2OfE * scale / softcap, -kMost, kMost));
  }
  // Inside the exponent a scale that is not positive would turn the hidden scores' -inf around or into NaN, and one
  // whose inverse is not a usual number would be of no use where scores are large.
  const bool usual_scale = scale > 0x1p-64 && scale < 0x1p64;
  rule.transforms = softcap > 0 || has_bias || !usual_scale;
  rule.multiplier = static_cast<float>(rule.transforms ? kLog2OfE : scale * kLog2OfE);
  rule.half_multiplier = rule.multiplier / 2;
  rule.inverse_half = 1 / rule.half_multiplier;
  rule.natural = rule.transforms ? 1.0f : rule.scale;
  return rule;
}

}  // namespace flash_dmattn::internal::cuda
