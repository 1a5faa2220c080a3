// Fills a table of kernels from the templates, once per instruction set and element type.
#pragma once

#include "cpu/backward-inl.h"
#include "cpu/decode-inl.h"
#include "cpu/forward-inl.h"
#include "cpu/kernel_set.h"

namespace flash_dmattn::internal::cpu {
namespace {

template <typename Products, typename T>
constexpr Kernels make_kernels() {
  Kernels kernels;
  kernels.forward_scratch = ForwardUnit<Products, T>::scratch_bytes;
  kernels.forward_unit = [](const ForwardProblem& problem, const ForwardSchedule& schedule,
                            const IntervalIndices& indices, std::int64_t unit, void* scratch,
                            AttentionCounters* counters) {
    ForwardUnit<Products, T>(problem, schedule, indices, scratch).run(problem, schedule, unit, counters);
  };
  kernels.multiplies_pairs = Products::kMultipliesPairs;
  kernels.decode_scratch = DecodeUnit<Products, T>::scratch_bytes;
  kernels.decode_unit = [](const ForwardProblem& problem, const IndexRows& lists, const DecodeSchedule& schedule,
                           const DecodeParts& parts, std::int64_t unit, void* scratch, AttentionCounters* counters) {
    DecodeUnit<Products, T>(problem, schedule, scratch).run(problem, lists, parts, unit, counters);
  };
  kernels.backward_scratch = BackwardUnit<Products, T>::scratch_bytes;
  kernels.backward_sums = [](const BackwardProblem& problem, const BackwardSchedule& schedule) {
    return GradientSums(problem, schedule, nullptr).bytes();
  };
  kernels.backward_unit = [](const BackwardProblem& problem, const BackwardSchedule& schedule,
                             const IntervalIndices& indices, std::int64_t unit, void* sums, void* scratch,
                             AttentionCounters* counters) {
    BackwardUnit<Products, T>(problem, schedule, indices, scratch).run(problem, schedule, unit, sums, counters);
  };
  kernels.finish_parts = count_finish_parts;
  kernels.finish_part = finish_gradients<T>;
  return kernels;
}

}  // namespace
}  // namespace flash_dmattn::internal::cpu
