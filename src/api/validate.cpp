#include "api/validate.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>

#include "api/check_tensor.h"

namespace flash_dmattn::internal {
namespace {

constexpr std::int64_t kMaxBytes = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMaxHeadDim = 256;
// Query heads of a key head: all of them may share a block of scratch memory, in which they are counted in 32 bits.
constexpr std::int64_t kMaxGroup = 1 << 16;

// ---- The inputs together.

Status check_tokens(const AttentionInputs& inputs) {
  const TensorView& query = inputs.query;
  const DType dtype = query.dtype;
  const struct {
    const char* name;
    const TensorView* view;
  } tokens[] = {{"query", &query}, {"key", &inputs.key}, {"value", &inputs.value}};
  for (const auto& [name, view] : tokens) {
    if (Status status = check_rank(name, *view, 4, 4); !status.ok()) return status;
    if (!is_floating(dtype)) {
      return Status::invalid("query", "must be float16, bfloat16, float32 or float64", show_dtype("query", dtype));
    }
    if (view->dtype != dtype) {
      return Status::invalid(name, "must have query's dtype",
                             show_dtype(name, view->dtype) + ", " + show_dtype("query", dtype));
    }
    if (Status status = check_memory(name, *view, Layout::kUnitHeadDim); !status.ok()) return status;
  }
  return {};
}

Status check_sizes(const AttentionInputs& inputs) {
  const TensorView &query = inputs.query, &key = inputs.key, &value = inputs.value;
  const auto both = [&](const char* name, const TensorView& view, const char* other_name, const TensorView& other) {
    return show(name, view) + ", " + show(other_name, other);
  };
  if (query.shape[3] < 1 || query.shape[3] > kMaxHeadDim) {
    return Status::invalid("query", "must have a head dim of 1 to 256", show("query", query));
  }
  if (key.shape[0] != query.shape[0]) {
    return Status::invalid("key", "must have query's batch size", both("key", key, "query", query));
  }
  if (key.shape[3] != query.shape[3]) {
    return Status::invalid("key", "must have query's head dim", both("key", key, "query", query));
  }
  if (value.shape[3] < 1 || value.shape[3] > kMaxHeadDim) {
    return Status::invalid("value", "must have a head dim of 1 to 256", show("value", value));
  }
  if (!std::equal(key.shape.begin(), key.shape.begin() + 3, value.shape.begin())) {
    return Status::invalid("value", "must have key's shape but for the head dim", both("value", value, "key", key));
  }
  if (Status status = check_length("query", query, query.shape[1]); !status.ok()) return status;
  if (Status status = check_length("key", key, key.shape[1]); !status.ok()) return status;
  const std::int64_t heads = query.shape[2], key_heads = key.shape[2];
  if (key_heads == 0 ? heads != 0 : heads % key_heads != 0) {
    return Status::invalid("query", "must have a multiple of key's heads", both("query", query, "key", key));
  }
  if (key_heads > 0 && heads / key_heads > kMaxGroup) {
    return Status::invalid("query", "must have at most 65536 heads for each of key's",
                           both("query", query, "key", key));
  }
  if (Status status = check_counts("query", query, query.shape[0], heads, query.shape[1]); !status.ok()) return status;
  if (Status status = check_counts("key", key, key.shape[0], key_heads, key.shape[1]); !status.ok()) return status;
  // What is made for each query head: intervals have up to one for every key.
  if (!product_fits({query.shape[0], heads, key.shape[1]}, kMaxPositions)) {
    return Status::invalid("key", "must have fewer than 2^44 positions for all heads of query and batch elements",
                           both("key", key, "query", query));
  }
  // A bias may have an entry for each of them, whose gradients are summed in float32.
  if (!product_fits({query.shape[0], query.shape[1], heads, key.shape[1]}, kMaxBytes / 8)) {
    return Status::invalid("query", "must make fewer than 2^60 scores B * H * Sq * Sk with key",
                           both("query", query, "key", key));
  }
  return {};
}

// Kernels other than fp64 compute in fp32, so there a number must be finite as a float.
bool finite_in(DType dtype, double number) {
  return std::isfinite(number) && (dtype == DType::kFloat64 || std::fabs(number) <= FLT_MAX);
}

std::string show_number(const char* name, double value) {
  std::ostringstream text;
  text << name << ' ' << value;
  return text.str();
}

Status check_options(const AttentionOptions& options, DType dtype) {
  if (options.scale && !finite_in(dtype, *options.scale)) {
    return Status::invalid("scale", "must be finite", show_number("scale", *options.scale));
  }
  if (!finite_in(dtype, options.softcap) || options.softcap < 0) {
    return Status::invalid("softcap", "must be finite and not negative", show_number("softcap", options.softcap));
  }
  // Beyond these its inverse, or products with it, would not be numbers of single precision.
  constexpr double kLeastSoftcap = 1e-30, kMostSoftcap = 1e30;
  if (dtype != DType::kFloat64 && options.softcap != 0 &&
      (options.softcap < kLeastSoftcap || options.softcap > kMostSoftcap)) {
    return Status::invalid("softcap", "must be 0 or between 1e-30 and 1e30, but in float64",
                           show_number("softcap", options.softcap));
  }
  return {};
}

TokenView token_view(const TensorView& view) { return {view.data, view.strides[0], view.strides[1], view.strides[2]}; }

// How many query heads read one of `heads` heads; 1 without query heads.
std::int64_t head_divisor(std::int64_t heads, const AttentionProblem& problem) {
  const std::int64_t divisor = heads == 1 ? problem.heads : heads == problem.heads ? 1 : problem.group();
  return std::max<std::int64_t>(divisor, 1);
}

// Reads a mask's or bias's dimensions as (batch, head, row, key); those it lacks have size 1.
Status make_broadcast(const char* name, const TensorView& view, const AttentionProblem& problem,
                      BroadcastView* result) {
  static constexpr int kSource[3][4] = {{-1, -1, 0, 1}, {0, 1, -1, 2}, {0, 1, 2, 3}};  // by rank - 2
  Dims sizes = {1, 1, 1, 1}, strides = {};
  for (int dim = 0; dim < 4; ++dim) {
    const int source = kSource[view.rank - 2][dim];
    if (source < 0) continue;
    sizes[dim] = view.shape[source];
    strides[dim] = sizes[dim] == 1 ? 0 : view.strides[source];
  }
  const auto fits = [&](int dim, std::int64_t full) { return sizes[dim] == 1 || sizes[dim] == full; };
  if (!fits(0, problem.batch) || !(fits(1, problem.heads) || sizes[1] == problem.key_heads) || !fits(2, problem.rows) ||
      !fits(3, problem.keys)) {
    const std::string full = "(" + std::to_string(problem.batch) + ", " + std::to_string(problem.heads) + " or " +
                             std::to_string(problem.key_heads) + ", " + std::to_string(problem.rows) + ", " +
                             std::to_string(problem.keys) + ")";
    return Status::invalid(name, "must broadcast to (B, H or Hkv, Sq, Sk) = " + full,
                           show_per_key(name, view, problem.batch, problem.keys));
  }
  *result = {view.data,
             view.dtype,
             sizes[0],
             sizes[1],
             sizes[2],
             sizes[3],
             strides[0],
             strides[1],
             strides[2],
             strides[3],
             head_divisor(sizes[1], problem)};
  return {};
}

Status read_mask(const TensorView& mask, AttentionProblem* problem) {
  if (mask.rank == 0) return {};
  if (Status status = check_rank("mask", mask, 2, 4); !status.ok()) return status;
  if (mask.dtype != DType::kBool) return Status::invalid("mask", "must be bool", show_dtype("mask", mask.dtype));
  if (Status status = check_memory("mask", mask, Layout::kAny); !status.ok()) return status;
  return make_broadcast("mask", mask, *problem, &problem->visibility.mask);
}

// Per key: the three dimensions of a per-key mask.
Status read_interval_bound(const char* name, const TensorView& bound, AttentionProblem* problem,
                           BroadcastView* result) {
  if (Status status = check_rank(name, bound, 3, 3); !status.ok()) return status;
  if (bound.dtype != DType::kInt32) return Status::invalid(name, "must be int32", show_dtype(name, bound.dtype));
  if (Status status = check_memory(name, bound, Layout::kAny); !status.ok()) return status;
  if (bound.shape[2] != problem->keys) {
    return Status::invalid(name, "must have one entry for each of the " + std::to_string(problem->keys) + " keys",
                           show(name, bound));
  }
  return make_broadcast(name, bound, *problem, result);
}

Status read_intervals(const KeyIntervals& intervals, AttentionProblem* problem) {
  if (!intervals.defined()) return {};
  if (intervals.window_size < 0) {
    return Status::invalid("intervals.window_size", "must be at least 0", std::to_string(intervals.window_size));
  }
  IntervalViews& views = problem->visibility.intervals;
  views.window_size = intervals.window_size;
  Status status = read_interval_bound("intervals.begin", intervals.begin, problem, &views.begin);
  if (!status.ok()) return status;
  return read_interval_bound("intervals.end", intervals.end, problem, &views.end);
}

// One of the tensors of KeyIndices: (B or 1, H or Hkv or 1, Sq or 1), and what `rank` adds to these.
Status read_index_tensor(const char* name, const TensorView& view, int rank, const AttentionProblem& problem,
                         BroadcastView* result) {
  if (Status status = check_rank(name, view, rank, rank); !status.ok()) return status;
  if (view.dtype != DType::kInt32) return Status::invalid(name, "must be int32", show_dtype(name, view.dtype));
  if (Status status = check_memory(name, view, Layout::kAny); !status.ok()) return status;
  const Dims& shape = view.shape;
  const auto fits = [](std::int64_t size, std::int64_t full) { return size == 1 || size == full; };
  if (!fits(shape[0], problem.batch) || !(fits(shape[1], problem.heads) || shape[1] == problem.key_heads) ||
      !fits(shape[2], problem.rows)) {
    return Status::invalid(name,
                           "must broadcast to (B, H or Hkv, Sq" + std::string(rank == 4 ? ", n) = (" : ") = (") +
                               std::to_string(problem.batch) + ", " + std::to_string(problem.heads) + " or " +
                               std::to_string(problem.key_heads) + ", " + std::to_string(problem.rows) +
                               (rank == 4 ? ", n)" : ")"),
                           show(name, view));
  }
  Dims strides = view.strides;
  for (int dim = 0; dim < 3; ++dim) {
    if (shape[dim] == 1) strides[dim] = 0;
  }
  *result = {view.data,
             view.dtype,
             shape[0],
             shape[1],
             shape[2],
             shape[3],
             strides[0],
             strides[1],
             strides[2],
             strides[3],
             head_divisor(shape[1], problem)};
  return {};
}

Status read_indices(const KeyIndices& indices, AttentionProblem* problem) {
  if (!indices.defined()) return {};
  IndexViews& views = problem->visibility.indices;
  if (indices.block_size < 1 || indices.block_size > std::numeric_limits<std::int32_t>::max()) {
    return Status::invalid("indices.block_size", "must be between 1 and 2^31 - 1", std::to_string(indices.block_size));
  }
  Status status = read_index_tensor("indices", indices.indices, 4, *problem, &views.entries);
  if (status.ok()) status = check_length("indices", indices.indices, indices.indices.shape[3]);
  if (status.ok() && indices.lengths.defined()) {
    status = read_index_tensor("indices.lengths", indices.lengths, 3, *problem, &views.lengths);
  }
  views.block_size = indices.block_size;
  return status;
}

Status read_bias(const TensorView& bias, AttentionProblem* problem) {
  if (bias.rank == 0) return {};
  if (Status status = check_rank("bias", bias, 2, 4); !status.ok()) return status;
  if (bias.dtype != problem->dtype && bias.dtype != DType::kFloat32) {
    return Status::invalid("bias", "must have query's dtype or float32",
                           show_dtype("bias", bias.dtype) + ", " + show_dtype("query", problem->dtype));
  }
  if (Status status = check_memory("bias", bias, Layout::kAny); !status.ok()) return status;
  return make_broadcast("bias", bias, *problem, &problem->bias);
}

Expected head_like(const char* name, const TensorView& view, DType dtype, const AttentionProblem& p, Layout layout) {
  return {name, &view, dtype, "(H)", 1, {p.heads}, layout};
}

Status read_sink(const TensorView& sink, AttentionProblem* problem) {
  if (sink.rank == 0) return {};
  if (Status status = check_rank("sink", sink, 1, 1); !status.ok()) return status;
  if (sink.dtype != problem->dtype && sink.dtype != DType::kFloat32) {
    return Status::invalid("sink", "must have query's dtype or float32",
                           show_dtype("sink", sink.dtype) + ", " + show_dtype("query", problem->dtype));
  }
  Status status = check_expected(head_like("sink", sink, sink.dtype, *problem, Layout::kAny));
  if (status.ok()) problem->sink = {sink.data, sink.dtype, sink.strides[0]};
  return status;
}

Status read_seqlens(const TensorView& seqlens, AttentionProblem* problem) {
  if (seqlens.rank == 0) return {};
  Status status = check_all({{"seqlens_k", &seqlens, DType::kInt32, "(B)", 1, {problem->batch}, Layout::kAny}});
  if (!status.ok()) return status;
  problem->visibility.seqlens = static_cast<const std::int32_t*>(seqlens.data);
  problem->visibility.seqlens_stride = seqlens.strides[0];
  return {};
}

// Only the backend that made a plan can read it: here its address is checked, its size where the backend is known.
Status read_plan(const AttentionPlan& plan, AttentionProblem* problem) {
  if (plan.data == nullptr && plan.bytes != 0) {
    return Status::invalid("plan", "must have data", std::to_string(plan.bytes) + " bytes at a null pointer");
  }
  if (reinterpret_cast<std::uintptr_t>(plan.data) % kMemoryAlignment != 0) {
    return Status::invalid("plan", "must be aligned to " + std::to_string(kMemoryAlignment) + " bytes",
                           "plan unaligned");
  }
  problem->visibility.plan = plan;
  return {};
}

Status read_visibility(const Visibility& visibility, AttentionProblem* problem) {
  problem->visibility.is_causal = visibility.is_causal;
  if (Status status = read_mask(visibility.mask, problem); !status.ok()) return status;
  if (Status status = read_intervals(visibility.intervals, problem); !status.ok()) return status;
  if (Status status = read_indices(visibility.indices, problem); !status.ok()) return status;
  if (Status status = read_seqlens(visibility.seqlens_k, problem); !status.ok()) return status;
  return read_plan(visibility.plan, problem);
}

DType lse_dtype(DType dtype) { return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }

Expected query_like(const char* name, const TensorView& view, const AttentionProblem& p, Layout layout) {
  return {name, &view, p.dtype, "(B, Sq, H, D)", 4, {p.batch, p.rows, p.heads, p.head_dim}, layout};
}

Expected key_like(const char* name, const TensorView& view, const AttentionProblem& p, Layout layout) {
  return {name, &view, p.dtype, "(B, Sk, Hkv, D)", 4, {p.batch, p.keys, p.key_heads, p.head_dim}, layout};
}

Expected out_like(const char* name, const TensorView& view, const AttentionProblem& p, Layout layout) {
  return {name, &view, p.dtype, "(B, Sq, H, Dv)", 4, {p.batch, p.rows, p.heads, p.value_dim}, layout};
}

Expected value_like(const char* name, const TensorView& view, const AttentionProblem& p, Layout layout) {
  return {name, &view, p.dtype, "(B, Sk, Hkv, Dv)", 4, {p.batch, p.keys, p.key_heads, p.value_dim}, layout};
}

Expected lse_like(const char* name, const TensorView& view, const AttentionProblem& p, Layout layout) {
  return {name, &view, lse_dtype(p.dtype), "(B, H, Sq)", 3, {p.batch, p.heads, p.rows}, layout};
}

Expected row_stats_like(const TensorView& view, const AttentionProblem& p) {
  return {"row_stats",        &view, lse_dtype(p.dtype), "(B, H, Sq, 2)", 4, {p.batch, p.heads, p.rows, 2},
          Layout::kContiguous};
}

Status read_bias_gradient(const TensorView& dbias, const TensorView& bias, BackwardProblem* problem) {
  if (dbias.rank == 0) return {};
  if (bias.rank == 0) return Status::invalid("dbias", "needs a bias", show("dbias", dbias) + ", no bias");
  const Expected expected = {"dbias", &dbias, bias.dtype, "of the bias", bias.rank, bias.shape, Layout::kContiguous};
  if (Status status = check_expected(expected); !status.ok()) return status;
  return make_broadcast("dbias", dbias, *problem, &problem->dbias);
}

Status read_sink_gradient(const TensorView& dsink, const TensorView& sink, BackwardProblem* problem) {
  if (dsink.rank == 0) return {};
  if (sink.rank == 0) return Status::invalid("dsink", "needs a sink", show("dsink", dsink) + ", no sink");
  Status status = check_expected(head_like("dsink", dsink, sink.dtype, *problem, Layout::kContiguous));
  if (status.ok()) problem->dsink = {dsink.data, dsink.dtype, 1};
  return status;
}

Status read_gradients(const AttentionGradients& gradients, const AttentionInputs& inputs, BackwardProblem* problem) {
  const struct {
    Expected expected;
    TokenView* result;
  } table[] = {
      {query_like("dquery", gradients.dquery, *problem, Layout::kContiguous), &problem->dquery},
      {key_like("dkey", gradients.dkey, *problem, Layout::kContiguous), &problem->dkey},
      {value_like("dvalue", gradients.dvalue, *problem, Layout::kContiguous), &problem->dvalue},
  };
  for (const auto& [expected, result] : table) {
    if (expected.view->rank == 0) continue;  // not asked for
    if (Status status = check_expected(expected); !status.ok()) return status;
    *result = token_view(*expected.view);
  }
  Status status = read_bias_gradient(gradients.dbias, inputs.bias, problem);
  return status.ok() ? read_sink_gradient(gradients.dsink, inputs.sink, problem) : status;
}

}  // namespace

Status make_problem(const AttentionInputs& inputs, const AttentionOptions& options, AttentionProblem* problem) {
  *problem = {};
  if (Status status = check_tokens(inputs); !status.ok()) return status;
  if (Status status = check_sizes(inputs); !status.ok()) return status;
  const DType dtype = inputs.query.dtype;
  if (Status status = check_options(options, dtype); !status.ok()) return status;

  const Dims &query = inputs.query.shape, &key = inputs.key.shape;
  problem->dtype = dtype;
  problem->batch = query[0];
  problem->rows = query[1];
  problem->heads = query[2];
  problem->head_dim = query[3];
  problem->value_dim = inputs.value.shape[3];
  problem->keys = key[1];
  problem->key_heads = key[2];
  problem->query = token_view(inputs.query);
  problem->key = token_view(inputs.key);
  problem->value = token_view(inputs.value);
  problem->scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(query[3])));
  problem->softcap = options.softcap;
  problem->deterministic = options.deterministic;

  if (Status status = read_visibility(inputs.visibility, problem); !status.ok()) return status;
  if (Status status = read_bias(inputs.bias, problem); !status.ok()) return status;
  return read_sink(inputs.sink, problem);
}

Status make_planned_problem(AttentionInputs inputs, const AttentionOptions& options, AttentionProblem* problem) {
  if (!inputs.value.defined()) inputs.value = inputs.key;
  return make_problem(inputs, options, problem);
}

Status make_forward_problem(const AttentionInputs& inputs, const AttentionOptions& options,
                            const AttentionOutputs& outputs, ForwardProblem* problem) {
  *problem = {};
  if (Status status = make_problem(inputs, options, problem); !status.ok()) return status;
  Status status = check_all({out_like("out", outputs.out, *problem, Layout::kContiguous),
                             lse_like("lse", outputs.lse, *problem, Layout::kContiguous)});
  if (!status.ok()) return status;
  problem->out = token_view(outputs.out);
  problem->lse = outputs.lse.data;
  if (outputs.row_stats.rank == 0) return {};
  problem->row_stats = outputs.row_stats.data;
  return check_expected(row_stats_like(outputs.row_stats, *problem));
}

Status make_backward_problem(const AttentionInputs& inputs, const AttentionCotangents& cotangents,
                             const AttentionOptions& options, const AttentionGradients& gradients,
                             BackwardProblem* problem) {
  *problem = {};
  if (Status status = make_problem(inputs, options, problem); !status.ok()) return status;
  Status status = check_all({out_like("out", cotangents.out, *problem, Layout::kUnitHeadDim),
                             lse_like("lse", cotangents.lse, *problem, Layout::kContiguous),
                             out_like("dout", cotangents.dout, *problem, Layout::kUnitHeadDim)});
  if (!status.ok()) return status;
  problem->out = token_view(cotangents.out);
  problem->lse = cotangents.lse.data;
  problem->dout = token_view(cotangents.dout);
  if (const TensorView& stats = cotangents.row_stats; stats.rank != 0) {
    if (status = check_expected(row_stats_like(stats, *problem)); !status.ok()) return status;
    problem->row_stats = stats.data;
  }
  if (const TensorView& dlse = cotangents.dlse; dlse.rank != 0) {
    if (status = check_expected(lse_like("dlse", dlse, *problem, Layout::kAny)); !status.ok()) return status;
    problem->dlse = dlse.data;
    problem->dlse_batch_stride = dlse.strides[0];
    problem->dlse_head_stride = dlse.strides[1];
    problem->dlse_row_stride = dlse.strides[2];
  }
  return read_gradients(gradients, inputs, problem);
}

}  // namespace flash_dmattn::internal
