// How a forward of few query rows over many keys is cut up: by keys, since there is little else to share out.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/arena.h"
#include "core/problem.h"
#include "flash_dmattn/attention.h"
#include "plan/chunk_plan.h"

namespace flash_dmattn::internal::cpu {

// Calls with at most so many query rows stream K and V, rather than packing them.
constexpr int kDecodeRows = 16;

// A unit attends all query rows of a run of key heads of one batch element over one split of the keys. Splits follow
// from shapes alone, so that results depend neither on the number of workers nor on strides.
struct DecodeSchedule {
  std::int64_t splits = 1, split_keys = 0;
  std::int64_t unit_key_heads = 1;  // of a run: key heads whose rows are neighbours in memory
  std::int64_t head_runs = 1;
  std::int64_t units = 0;
  int pass_heads = 1;  // query heads that share a plan and are attended together
  // Keys that are planned together, for all passes of a unit: few enough that the plans stay in the L2 cache.
  std::int64_t plan_keys = 0;

  struct Unit {
    std::int64_t batch, key_head_begin, key_head_end, split;
    KeySpan keys;
  };
  // Neighbouring units read neighbouring memory.
  Unit unit(const AttentionProblem&, std::int64_t index) const;
  // Passes over the keys by one unit, at most: groups of query heads that see different keys.
  int passes(const AttentionProblem&) const;
};

// The most query rows, times query heads of a key head, that stream K and V where the kernels multiply packed pairs of
// 16-bit floats: those take half the time or less of single precision, which pays for packing from here on. Measured
// with the AVX-512 dot products on Zen 4.
constexpr std::int64_t kDecodeRowsBesidePairs = 8;

// multiplies_pairs: of the kernels that the call would have otherwise.
bool is_decode(const AttentionProblem&, bool multiplies_pairs);
DecodeSchedule make_decode_schedule(const AttentionProblem&);

// How many workers the call is worth, at most one a unit.
int decode_worker_count(const AttentionProblem&, const DecodeSchedule&, int concurrency);

// The plans of a unit, some keys at a time. Those of all passes stand side by side, so that the unit can go over a
// block of keys with every one of them before it goes on to the next block.
class DecodePlans {
 public:
  static std::size_t scratch_bytes(const AttentionProblem&, const DecodeSchedule&);

  // counters: null if nobody counts.
  // lists: built.
  DecodePlans(const AttentionProblem&, const IndexRows& lists, const DecodeSchedule&, const DecodeSchedule::Unit&,
              void* scratch, AttentionCounters*);

  bool next();  // plans the next keys; false if there are none
  int passes() const { return passes_; }
  const ChunkPlan& plan(int pass) const { return *plans_[pass]; }

 private:
  const AttentionProblem& problem_;
  const DecodeSchedule& schedule_;
  const DecodeSchedule::Unit unit_;
  AttentionCounters* counters_;
  KeySpan span_;
  std::int64_t end_;
  int passes_;
  ChunkPlanner* planners_;
  const ChunkPlan** plans_;
};

// What a unit sums up over its keys, for each query row of a key head.
struct DecodePart {
  float* maxima;  // the highest scores
  float* sums;    // of probabilities relative to the maximum
  float* out;     // of values, weighted by these; rows are out_stride apart
};

// The parts of all units, in memory that they share. A pair is a key head of a batch element.
class DecodeParts {
 public:
  DecodeParts(const AttentionProblem&, const DecodeSchedule&, Arena*);

  std::int64_t rows() const { return rows_; }  // of a part: all query rows of a key head
  int out_stride() const { return out_stride_; }
  DecodePart of(std::int64_t pair, std::int64_t split) const;

  // Before the first unit.
  void start() const;
  // A part is complete. True for the last one of its pair: now all of them can be merged.
  bool complete(std::int64_t pair) const;

 private:
  std::int64_t pairs_, splits_, rows_;
  int out_stride_;
  float *maxima_, *sums_, *out_;
  std::int32_t* completed_;  // parts of each pair
};

}  // namespace flash_dmattn::internal::cpu
