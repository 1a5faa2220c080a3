// The kernels of one instruction set, as the dispatcher sees them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/problem.h"
#include "cpu/decode_schedule.h"
#include "cpu/schedule.h"
#include "flash_dmattn/attention.h"
#include "plan/interval_index.h"

namespace flash_dmattn::internal::cpu {

// One element type. Units of a call may run at the same time, each with scratch memory of its own.
struct Kernels {
  std::size_t (*forward_scratch)(const AttentionProblem&, const ForwardSchedule&) = nullptr;
  void (*forward_unit)(const ForwardProblem&, const ForwardSchedule&, const IntervalIndices&, std::int64_t unit,
                       void* scratch, AttentionCounters*) = nullptr;

  // Whether forward and backward multiply pairs of 16-bit floats, rather than single precision.
  bool multiplies_pairs = false;

  // Of calls with few query rows. All units share `lists`, and `parts`; the last of a key head writes the results.
  std::size_t (*decode_scratch)(const AttentionProblem&, const DecodeSchedule&) = nullptr;
  void (*decode_unit)(const ForwardProblem&, const IndexRows& lists, const DecodeSchedule&, const DecodeParts& parts,
                      std::int64_t unit, void* scratch, AttentionCounters*) = nullptr;

  // `sums` is memory that all units share; after the last unit finish_part turns it into the gradients.
  std::size_t (*backward_scratch)(const BackwardProblem&, const BackwardSchedule&) = nullptr;
  std::size_t (*backward_sums)(const BackwardProblem&, const BackwardSchedule&) = nullptr;
  void (*backward_unit)(const BackwardProblem&, const BackwardSchedule&, const IntervalIndices&, std::int64_t unit,
                        void* sums, void* scratch, AttentionCounters*) = nullptr;
  std::int64_t (*finish_parts)(const BackwardProblem&, const BackwardSchedule&) = nullptr;
  void (*finish_part)(const BackwardProblem&, const BackwardSchedule&, std::int64_t part, const void* sums) = nullptr;

  // Called by each worker before its first and after its last unit (matrix tiles need setting up).
  void (*enter)() = nullptr;
  void (*leave)() = nullptr;

  bool defined() const { return forward_unit != nullptr; }
};

struct KernelSet {
  const char* name;
  Kernels float32, float16, bfloat16;  // undefined: the next slower set does as well
};

extern const KernelSet kBaselineKernels;
#if defined(__x86_64__)
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;
extern const KernelSet kAvx512Bf16Kernels;
extern const KernelSet kAmxKernels;
#endif

}  // namespace flash_dmattn::internal::cpu
