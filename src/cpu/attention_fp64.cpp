// Attention in double precision, one query row at a time: what gradient checks and the other kernels'
// tests are compared with. Plain on purpose; see kernel_set.h for the fast kernels.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/backend.h"
#include "cpu/sink-inl.h"
#include "plan/bits.h"
#include "plan/index_rows.h"

namespace flash_dmattn::internal::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

double* token(const TokenView& view, std::int64_t b, std::int64_t position, std::int64_t head) {
  return static_cast<double*>(view.data) + b * view.batch_stride + position * view.token_stride +
         head * view.head_stride;
}

double dot(const double* x, const double* y, std::int64_t size) {
  double sum = 0;
  for (std::int64_t d = 0; d < size; ++d) sum += x[d] * y[d];
  return sum;
}

void add_scaled(double factor, const double* x, std::int64_t size, double* sum) {
  for (std::int64_t d = 0; d < size; ++d) sum[d] += factor * x[d];
}

void fill_zero(const TokenView& view, std::int64_t count) {
  if (view.defined()) std::fill_n(static_cast<double*>(view.data), count, 0.0);
}

// The keys that one row sees, in order, and their scores. Hidden keys and hidden biases are never read.
class VisibleRow {
 public:
  explicit VisibleRow(const AttentionProblem& problem) : p_(problem) {
    const auto capacity = static_cast<std::size_t>(problem.keys);
    keys_.reserve(capacity);
    scores_.reserve(capacity);
    slopes_.reserve(capacity);
    if (problem.visibility.indices.defined()) listed_.resize(static_cast<std::size_t>(words_for(problem.keys)));
  }

  void load(std::int64_t b, std::int64_t h, std::int64_t row) {
    keys_.clear();
    scores_.clear();
    slopes_.clear();
    const std::int64_t exist = p_.key_count(b);
    const std::int64_t end = p_.visibility.is_causal ? std::min(exist, row + exist - p_.rows + 1) : exist;
    const double* query = token(p_.query, b, row, h);
    const IndexViews& indices = p_.visibility.indices;
    if (indices.defined()) {
      std::fill(listed_.begin(), listed_.end(), 0);
      set_listed_bits(indices, row_lists(indices, b, h, row), 0, {0, p_.keys}, listed_.data());
    }
    for (std::int64_t j = 0; j < end; ++j) {
      if (!is_listed(j) || !mask_allows(b, h, row, j)) continue;
      double score = p_.scale * dot(query, token(p_.key, b, j, h / p_.group()), p_.head_dim);
      double slope = 1;  // of the score with bias by scale * q.k
      if (p_.softcap > 0) {
        const double squashed = std::tanh(score / p_.softcap);
        score = p_.softcap * squashed;
        slope = 1 - squashed * squashed;
      }
      keys_.push_back(j);
      scores_.push_back(score + bias(b, h, row, j));
      slopes_.push_back(slope);
    }
  }

  std::size_t size() const { return keys_.size(); }
  std::int64_t key(std::size_t i) const { return keys_[i]; }
  double score(std::size_t i) const { return scores_[i]; }
  double slope(std::size_t i) const { return slopes_[i]; }

  // NaN if any score is; -inf without keys.
  double max_score() const {
    double max = -kInfinity;
    for (const double score : scores_) {
      if (score > max || std::isnan(score)) max = score;
    }
    return max;
  }

 private:
  bool is_listed(std::int64_t j) const {
    return listed_.empty() || ((listed_[static_cast<std::size_t>(j / kWordBits)] >> (j % kWordBits)) & 1) != 0;
  }

  bool mask_allows(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t j) const {
    const IntervalViews& intervals = p_.visibility.intervals;
    if (intervals.defined()) {
      if (row < interval_bound(intervals.begin, b, h, j) || row >= interval_bound(intervals.end, b, h, j)) return false;
    }
    const BroadcastView& mask = p_.visibility.mask;
    if (!mask.defined()) return true;
    const auto* data = static_cast<const std::uint8_t*>(mask.data);
    return data[mask.offset(b, h) + row * mask.row_stride + j * mask.key_stride] != 0;
  }

  static std::int32_t interval_bound(const BroadcastView& bound, std::int64_t b, std::int64_t h, std::int64_t j) {
    return static_cast<const std::int32_t*>(bound.data)[bound.offset(b, h) + j * bound.key_stride];
  }

  double bias(std::int64_t b, std::int64_t h, std::int64_t row, std::int64_t j) const {
    const BroadcastView& bias = p_.bias;
    if (!bias.defined()) return 0;
    const std::int64_t offset = bias.offset(b, h) + row * bias.row_stride + j * bias.key_stride;
    return bias.dtype == DType::kFloat64 ? static_cast<const double*>(bias.data)[offset]
                                         : static_cast<const float*>(bias.data)[offset];
  }

  const AttentionProblem& p_;
  std::vector<std::int64_t> keys_;
  std::vector<double> scores_, slopes_;
  std::vector<std::uint64_t> listed_;  // a bit for every key; empty: all are
};

// Calls visit(b, query head, row, what it sees) for every row. Rows of one batch element and key head
// are visited in order by the same worker, so that they may add to their keys' gradients and the result
// does not depend on the number of workers.
template <typename Visit>
void for_each_row(const AttentionProblem& p, int max_workers, Executor& executor, AttentionCounters* counters,
                  const Visit& visit) {
  const std::int64_t units = p.batch * p.key_heads;
  const int workers = static_cast<int>(std::min<std::int64_t>(max_workers, units));
  if (workers <= 0) return;
  std::vector<std::int64_t> kept(static_cast<std::size_t>(workers));
  std::vector<VisibleRow> scratch;  // allocated here, since an executor's tasks must not throw
  for (int worker = 0; worker < workers; ++worker) scratch.emplace_back(p);

  executor.run(workers, [&](int worker) {
    VisibleRow& seen = scratch[static_cast<std::size_t>(worker)];
    for (std::int64_t unit = worker; unit < units; unit += workers) {
      const std::int64_t b = unit / p.key_heads, first_head = unit % p.key_heads * p.group();
      for (std::int64_t h = first_head; h < first_head + p.group(); ++h) {
        for (std::int64_t row = 0; row < p.rows; ++row) {
          seen.load(b, h, row);
          kept[static_cast<std::size_t>(worker)] += static_cast<std::int64_t>(seen.size());
          visit(b, h, row, seen);
        }
      }
    }
  });
  if (counters == nullptr) return;
  for (const std::int64_t count : kept) {
    counters->kept_scores += count;
    counters->computed_scores += count;  // a hidden score is never evaluated here
  }
}

void store_stats(const ForwardProblem& p, std::int64_t index, double max, double log_sum) {
  if (p.row_stats == nullptr) return;
  auto* stats = static_cast<double*>(p.row_stats) + 2 * index;
  stats[0] = max;
  stats[1] = log_sum;
}

double sink_of(const AttentionProblem& p, std::int64_t h) {
  const std::int64_t at = h * p.sink.stride;
  return p.sink.dtype == DType::kFloat64 ? static_cast<const double*>(p.sink.data)[at]
                                         : static_cast<const float*>(p.sink.data)[at];
}

void forward_row(const ForwardProblem& p, std::int64_t b, std::int64_t h, std::int64_t row, const VisibleRow& seen) {
  double* out = token(p.out, b, row, h);
  const std::int64_t index = (b * p.heads + h) * p.rows + row;
  double& lse = static_cast<double*>(p.lse)[index];
  const double max = seen.max_score();
  if (!std::isfinite(max)) {  // nothing to see, or a score that breaks the row
    std::fill_n(out, p.value_dim, max == -kInfinity ? 0.0 : kNaN);
    lse = max;
    store_stats(p, index, max, 0);
    return;
  }
  double sum = 0;
  std::fill_n(out, p.value_dim, 0.0);
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const double weight = std::exp(seen.score(i) - max);
    sum += weight;
    add_scaled(weight, token(p.value, b, seen.key(i), h / p.group()), p.value_dim, out);
  }
  const double whole_sum = p.sink.defined() ? sum_with_sink(sink_of(p, h), max, sum) : sum;
  for (std::int64_t d = 0; d < p.value_dim; ++d) out[d] /= whole_sum;
  const double log_sum = std::log(sum);
  lse = max + log_sum;
  store_stats(p, index, max, log_sum);
}

// The gradients of a row's bias and sink go to `dbias` and `dsink` where these are not null.
void backward_row(const BackwardProblem& p, std::int64_t b, std::int64_t h, std::int64_t row, const VisibleRow& seen,
                  double* dbias, double* dsink) {
  const std::int64_t index = (b * p.heads + h) * p.rows + row;
  const double lse = static_cast<const double*>(p.lse)[index];
  const auto* stats = static_cast<const double*>(p.row_stats);
  const double max = stats == nullptr ? lse : stats[2 * index], log_sum = stats == nullptr ? 0 : stats[2 * index + 1];
  if (lse == -kInfinity) return;  // sees nothing, so its query and dout may hold anything
  const double* query = token(p.query, b, row, h);
  const double* dout = token(p.dout, b, row, h);
  const double sink = p.sink.defined() ? sink_of(p, h) : -kInfinity;
  const SinkShares shares = shares_of_sum(sink, max, log_sum);
  double delta = dot(dout, token(p.out, b, row, h), p.value_dim);
  if (dsink != nullptr && sink != -kInfinity) dsink[h] -= shares.sink * delta;
  delta *= shares.keys;
  if (p.dlse != nullptr) {
    delta -=
        static_cast<const double*>(p.dlse)[b * p.dlse_batch_stride + h * p.dlse_head_stride + row * p.dlse_row_stride];
  }
  const std::int64_t key_head = h / p.group();
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const std::int64_t j = seen.key(i);
    const double probability = std::isfinite(lse) ? std::exp(seen.score(i) - max - log_sum) : kNaN;
    const double dscore = probability * (shares.keys * dot(dout, token(p.value, b, j, key_head), p.value_dim) - delta);
    const double dproduct = p.scale * seen.slope(i) * dscore;
    if (p.dvalue.defined()) add_scaled(shares.keys * probability, dout, p.value_dim, token(p.dvalue, b, j, key_head));
    if (p.dquery.defined()) {
      add_scaled(dproduct, token(p.key, b, j, key_head), p.head_dim, token(p.dquery, b, row, h));
    }
    if (p.dkey.defined()) add_scaled(dproduct, query, p.head_dim, token(p.dkey, b, j, key_head));
    if (dbias != nullptr) dbias[p.dbias.offset(b, h) + row * p.dbias.row_stride + j * p.dbias.key_stride] += dscore;
  }
}

// A gradient that is float64 or float32, summed in float64.
class SummedGradient {
 public:
  SummedGradient(void* data, DType dtype, std::int64_t count)
      : data_(data), own_(static_cast<std::size_t>(data != nullptr && dtype == DType::kFloat32 ? count : 0)) {
    sums_ = dtype == DType::kFloat32 ? own_.data() : static_cast<double*>(data);
    if (data == nullptr) sums_ = nullptr;
    if (sums_ != nullptr) std::fill_n(sums_, count, 0.0);
  }

  double* sums() const { return sums_; }  // null: not asked for
  void store() const {
    std::transform(own_.begin(), own_.end(), static_cast<float*>(data_),
                   [](double sum) { return static_cast<float>(sum); });
  }

 private:
  void* data_;
  std::vector<double> own_;
  double* sums_;
};

}  // namespace

void forward_fp64(const ForwardProblem& p, Executor& executor, AttentionCounters* counters) {
  for_each_row(p, executor.concurrency(), executor, counters,
               [&](std::int64_t b, std::int64_t h, std::int64_t row, const VisibleRow& seen) {
                 forward_row(p, b, h, row, seen);
               });
}

void backward_fp64(const BackwardProblem& p, Executor& executor, AttentionCounters* counters) {
  fill_zero(p.dquery, p.batch * p.rows * p.heads * p.head_dim);
  fill_zero(p.dkey, p.batch * p.keys * p.key_heads * p.head_dim);
  fill_zero(p.dvalue, p.batch * p.keys * p.key_heads * p.value_dim);
  SummedGradient dbias(p.dbias.data, p.dbias.dtype, p.dbias.batches * p.dbias.heads * p.dbias.rows * p.dbias.keys);
  SummedGradient dsink(p.dsink.data, p.dsink.dtype, p.heads);

  // Batch elements and heads may share these gradients: one worker adds them up, always in the same order.
  const int workers = dbias.sums() != nullptr || dsink.sums() != nullptr ? 1 : executor.concurrency();
  for_each_row(p, workers, executor, counters,
               [&](std::int64_t b, std::int64_t h, std::int64_t row, const VisibleRow& seen) {
                 backward_row(p, b, h, row, seen, dbias.sums(), dsink.sums());
               });
  dbias.store();
  dsink.store();
}

}  // namespace flash_dmattn::internal::cpu
