// Where backward units leave what several of them contribute to, and how it becomes gradients: sums over
// units are taken in a fixed order, so that results do not depend on who finished first.
#pragma once

#include "core/arena.h"
#include "cpu/schedule.h"
#include "cpu/scores-inl.h"

namespace flash_dmattn::internal::cpu {
namespace {

// Floats that rows of sums are a multiple of: the longest vector of any instruction set.
constexpr std::int64_t kSumsAlignment = 16;
constexpr std::int64_t kFinishKeys = 512;  // keys of one part of the final summation

// dK and dV of every (unit, pair of its share group) as rows of floats, and of every unit the columns of a bias
// gradient that is broadcast over rows and the gradients of its heads' sinks.
class GradientSums {
 public:
  GradientSums(const BackwardProblem& problem, const BackwardSchedule& schedule, void* memory)
      : problem_(problem),
        schedule_(schedule),
        dkey_stride_(round_up(problem.head_dim, kSumsAlignment)),
        dvalue_stride_(round_up(problem.value_dim, kSumsAlignment)) {
    Arena arena(memory);
    // A group that one unit does all alone needs no second sum: the unit keeps it to itself.
    if (schedule.splits > 1) {
      const auto pairs = static_cast<std::size_t>(schedule.units * pairs_per_unit());
      if (problem.dkey.defined()) dkey_ = arena.take<float>(pairs * dkey_size());
      if (problem.dvalue.defined()) dvalue_ = arena.take<float>(pairs * dvalue_size());
    }
    if (schedule.bias_gradient == BiasGradient::kColumns) {
      columns_ = arena.take<float>(static_cast<std::size_t>(schedule.units) * columns_size());
    }
    if (problem.dsink.defined()) dsinks_ = arena.take<double>(static_cast<std::size_t>(schedule.units * sink_heads()));
    bytes_ = arena.used();
  }

  std::size_t bytes() const { return bytes_; }
  // Between rows of a pair's dK or dV, and floats of all of them.
  std::int64_t dkey_stride() const { return dkey_stride_; }
  std::int64_t dvalue_stride() const { return dvalue_stride_; }
  std::size_t dkey_size() const { return static_cast<std::size_t>(problem_.keys * dkey_stride_); }
  std::size_t dvalue_size() const { return static_cast<std::size_t>(problem_.keys * dvalue_stride_); }
  std::int64_t pairs_per_unit() const { return schedule_.group_batches * schedule_.group_key_heads; }

  float* dkey(std::int64_t unit, std::int64_t pair) const { return at(dkey_, unit, pair, dkey_size()); }
  float* dvalue(std::int64_t unit, std::int64_t pair) const { return at(dvalue_, unit, pair, dvalue_size()); }

  // Heads of the bias that one unit's key head meets.
  std::int64_t column_heads() const {
    return problem_.dbias.defined() && problem_.dbias.head_divisor == 1 ? problem_.group() : 1;
  }
  std::size_t columns_size() const { return static_cast<std::size_t>(column_heads() * problem_.dbias.keys); }
  float* columns(std::int64_t unit) const {
    return columns_ == nullptr ? nullptr : columns_ + static_cast<std::size_t>(unit) * columns_size();
  }

  // Query heads of one unit, and the gradients of their sinks.
  std::int64_t sink_heads() const { return schedule_.group_key_heads * problem_.group(); }
  double* dsinks(std::int64_t unit) const { return dsinks_ == nullptr ? nullptr : dsinks_ + unit * sink_heads(); }

 private:
  float* at(float* base, std::int64_t unit, std::int64_t pair, std::size_t size) const {
    return base == nullptr ? nullptr : base + static_cast<std::size_t>(unit * pairs_per_unit() + pair) * size;
  }

  const BackwardProblem& problem_;
  const BackwardSchedule& schedule_;
  std::int64_t dkey_stride_, dvalue_stride_;
  float *dkey_ = nullptr, *dvalue_ = nullptr, *columns_ = nullptr;
  double* dsinks_ = nullptr;
  std::size_t bytes_ = 0;
};

// Rows [begin, end) of dK or dV of one pair: the sum of its `splits` partial sums, which are
// `split_stride` floats apart, times `factor`.
template <typename T>
HWY_INLINE void finish_rows(const float* sums, std::int64_t splits, std::size_t split_stride, std::int64_t row_stride,
                            std::int64_t begin, std::int64_t end, int head_dim, float factor, T* to,
                            std::int64_t to_stride) {
  float total[kMaxHeadDim];
  for (std::int64_t key = begin; key < end; ++key) {
    const float* from = sums + key * row_stride;
    for (std::int64_t i = 0; i < row_stride; i += kLanes) {
      Vec sum = hn::Load(kFloats, from + i);
      for (std::int64_t split = 1; split < splits; ++split) {
        sum = hn::Add(sum, hn::Load(kFloats, from + static_cast<std::size_t>(split) * split_stride + i));
      }
      hn::StoreU(sum, kFloats, total + i);
    }
    store_row(total, factor, head_dim, to + key * to_stride);
  }
}

HWY_INLINE std::int64_t key_parts(const BackwardProblem& problem) {
  return (problem.keys + kFinishKeys - 1) / kFinishKeys;
}

// Parts of the final summation: blocks of keys of every pair, then the heads of a broadcast bias, then all sinks.
HWY_INLINE std::int64_t count_pair_parts(const BackwardProblem& problem, const BackwardSchedule& schedule) {
  const bool needed = schedule.splits > 1 && (problem.dkey.defined() || problem.dvalue.defined());
  return needed ? problem.batch * problem.key_heads * key_parts(problem) : 0;
}
HWY_INLINE std::int64_t count_column_parts(const BackwardProblem& problem, const BackwardSchedule& schedule) {
  return schedule.bias_gradient == BiasGradient::kColumns ? problem.dbias.batches * problem.dbias.heads : 0;
}
inline std::int64_t count_finish_parts(const BackwardProblem& problem, const BackwardSchedule& schedule) {
  return count_pair_parts(problem, schedule) + count_column_parts(problem, schedule) +
         (problem.dsink.defined() ? 1 : 0);
}

// One head of a bias gradient that is broadcast over rows: all units that saw it, in order.
template <typename T>
HWY_INLINE void finish_columns(const BackwardProblem& problem, const BackwardSchedule& schedule,
                               const GradientSums& sums, std::int64_t bias_batch, std::int64_t bias_head) {
  const BroadcastView& dbias = problem.dbias;
  float total[kFinishKeys];
  for (std::int64_t begin = 0; begin < dbias.keys; begin += kFinishKeys) {
    const std::int64_t count = dbias.keys - begin < kFinishKeys ? dbias.keys - begin : kFinishKeys;
    fill_floats(total, count, 0.0f);
    for (std::int64_t index = 0; index < schedule.units; ++index) {
      const BackwardSchedule::Unit unit = schedule.unit(index);
      if (dbias.batches > 1 && unit.batch_begin != bias_batch) continue;
      for (std::int64_t column_head = 0; column_head < sums.column_heads(); ++column_head) {
        const std::int64_t head = unit.key_head_begin * problem.group() + column_head;
        if (head / dbias.head_divisor != bias_head) continue;
        const float* from = sums.columns(index) + column_head * dbias.keys + begin;
        for (std::int64_t key = 0; key < count; ++key) total[key] += from[key];
      }
    }
    const std::int64_t to = bias_batch * dbias.batch_stride + bias_head * dbias.head_stride + begin;
    if (dbias.dtype == DType::kFloat32) {
      store_row(total, 1.0f, count, static_cast<float*>(dbias.data) + to);
    } else {
      store_row(total, 1.0f, count, static_cast<T*>(dbias.data) + to);
    }
  }
}

// The gradients of all sinks: those of the units, in order.
template <typename T>
HWY_INLINE void finish_sinks(const BackwardProblem& problem, const BackwardSchedule& schedule,
                             const GradientSums& sums) {
  const std::int64_t heads = sums.sink_heads(), batch_units = schedule.head_groups * schedule.splits;
  for (std::int64_t head = 0; head < problem.heads; ++head) {
    double total = 0;
    for (std::int64_t first = head / heads * schedule.splits; first < schedule.units; first += batch_units) {
      for (std::int64_t unit = first; unit < first + schedule.splits; ++unit) total += sums.dsinks(unit)[head % heads];
    }
    const auto rounded = static_cast<float>(total);
    if (problem.dsink.dtype == DType::kFloat32) {
      static_cast<float*>(problem.dsink.data)[head] = rounded;
    } else {
      store_row(&rounded, 1.0f, 1, static_cast<T*>(problem.dsink.data) + head);
    }
  }
}

template <typename T>
void finish_gradients(const BackwardProblem& problem, const BackwardSchedule& schedule, std::int64_t part,
                      const void* memory) {
  const GradientSums sums(problem, schedule, const_cast<void*>(memory));
  const std::int64_t pair_parts = count_pair_parts(problem, schedule);
  const std::int64_t column_parts = count_column_parts(problem, schedule);
  if (part == pair_parts + column_parts) return finish_sinks<T>(problem, schedule, sums);
  if (part >= pair_parts) {
    const std::int64_t index = part - pair_parts;
    return finish_columns<T>(problem, schedule, sums, index / problem.dbias.heads, index % problem.dbias.heads);
  }
  const std::int64_t begin = part % key_parts(problem) * kFinishKeys;
  const std::int64_t end = begin + kFinishKeys < problem.keys ? begin + kFinishKeys : problem.keys;
  const std::int64_t pair = part / key_parts(problem);
  const std::int64_t batch = pair / problem.key_heads, key_head = pair % problem.key_heads;
  const std::int64_t group =
      batch / schedule.group_batches * schedule.head_groups + key_head / schedule.group_key_heads;
  const std::int64_t pair_in_group =
      batch % schedule.group_batches * schedule.group_key_heads + key_head % schedule.group_key_heads;
  const std::int64_t first_unit = group * schedule.splits;
  const auto pairs = static_cast<std::size_t>(sums.pairs_per_unit());
  if (problem.dkey.defined()) {
    finish_rows(sums.dkey(first_unit, pair_in_group), schedule.splits, pairs * sums.dkey_size(), sums.dkey_stride(),
                begin, end, static_cast<int>(problem.head_dim), static_cast<float>(problem.scale),
                head_tokens<T>(problem.dkey, batch, key_head), problem.dkey.token_stride);
  }
  if (problem.dvalue.defined()) {
    finish_rows(sums.dvalue(first_unit, pair_in_group), schedule.splits, pairs * sums.dvalue_size(),
                sums.dvalue_stride(), begin, end, static_cast<int>(problem.value_dim), 1.0f,
                head_tokens<T>(problem.dvalue, batch, key_head), problem.dvalue.token_stride);
  }
}

}  // namespace
}  // namespace flash_dmattn::internal::cpu
