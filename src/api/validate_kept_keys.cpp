#include <algorithm>
#include <string>

#include "api/check_tensor.h"
#include "api/validate.h"

namespace flash_dmattn::internal {

namespace {

Status read_cache_scores(const TensorView& cache_scores, const KeptKeys& kept, KeptKeysProblem* problem) {
  if (cache_scores.rank == 0) return {};
  if (Status status = check_rank("cache_scores", cache_scores, 3, 3); !status.ok()) return status;
  if (cache_scores.dtype != kept.scores.dtype) {
    return Status::invalid(
        "cache_scores", "must have the dtype of scores",
        show_dtype("cache_scores", cache_scores.dtype) + ", " + show_dtype("scores", kept.scores.dtype));
  }
  const Dims& shape = kept.indices.shape;
  if (cache_scores.shape[0] != shape[0] || cache_scores.shape[1] != shape[1]) {
    return Status::invalid("cache_scores", "must be (B, heads, Sk) for indices (B, heads, w)",
                           show("cache_scores", cache_scores) + ", " + show("indices", kept.indices));
  }
  if (kept.lengths.rank == 0) {
    return Status::invalid("cache_scores", "needs the lengths of the kept keys", show("cache_scores", cache_scores));
  }
  if (Status status = check_length("cache_scores", cache_scores, cache_scores.shape[2]); !status.ok()) return status;
  if (Status status = check_memory("cache_scores", cache_scores, Layout::kAny); !status.ok()) return status;
  problem->cache_scores = cache_scores.data;
  problem->cache_keys = cache_scores.shape[2];
  std::copy_n(cache_scores.strides.begin(), 3, problem->cache_score_strides);
  return {};
}

}  // namespace

Status make_kept_keys_problem(const NewKeys& new_keys, const KeptKeys& kept, const TensorView& lists,
                              KeptKeysProblem* problem) {
  *problem = {};
  const TensorView &indices = kept.indices, &scores = kept.scores, &new_scores = new_keys.scores;
  Status status =
      check_expected({"indices", &indices, DType::kInt32, "(B, heads, w)", 3, indices.shape, Layout::kContiguous});
  if (!status.ok()) return status;
  const std::int64_t batch = indices.shape[0], heads = indices.shape[1], window = indices.shape[2];
  if (status = check_length("indices", indices, window); !status.ok()) return status;
  if (status = check_counts("indices", indices, batch, heads, window); !status.ok()) return status;

  if (status = check_rank("scores", scores, 3, 3); !status.ok()) return status;
  if (!is_floating(scores.dtype)) {
    return Status::invalid("scores", "must be float16, bfloat16, float32 or float64",
                           show_dtype("scores", scores.dtype));
  }
  status = check_expected({"scores", &scores, scores.dtype, "of the indices", 3, indices.shape, Layout::kContiguous});
  if (!status.ok()) return status;

  if (status = check_rank("new_scores", new_scores, 3, 3); !status.ok()) return status;
  if (new_scores.dtype != scores.dtype) {
    return Status::invalid("new_scores", "must have the dtype of scores",
                           show_dtype("new_scores", new_scores.dtype) + ", " + show_dtype("scores", scores.dtype));
  }
  const std::int64_t rows = new_scores.shape[2];
  if (new_scores.shape[0] != batch || new_scores.shape[1] != heads || rows > kMaxNewKeys) {
    return Status::invalid(
        "new_scores", "must be (B, heads, S) for indices (B, heads, w), with S at most " + std::to_string(kMaxNewKeys),
        show("new_scores", new_scores) + ", " + show("indices", indices));
  }
  if (status = check_memory("new_scores", new_scores, Layout::kAny); !status.ok()) return status;
  status = check_expected({"positions", &new_keys.positions, DType::kInt32, "(B)", 1, {batch}, Layout::kAny});
  if (!status.ok()) return status;
  if (kept.lengths.rank != 0) {
    const Dims shape = {batch, heads};
    status = check_expected({"lengths", &kept.lengths, DType::kInt32, "(B, heads)", 2, shape, Layout::kContiguous});
    if (!status.ok()) return status;
    problem->lengths = static_cast<std::int32_t*>(kept.lengths.data);
  }
  if (status = read_cache_scores(new_keys.cache_scores, kept, problem); !status.ok()) return status;
  if (lists.rank != 0) {
    const Dims shape = {batch, heads, rows, window};
    status = check_expected({"lists", &lists, DType::kInt32, "(B, heads, S, w)", 4, shape, Layout::kContiguous});
    if (!status.ok()) return status;
    problem->lists = static_cast<std::int32_t*>(lists.data);
  }

  problem->batch = batch;
  problem->heads = heads;
  problem->window = window;
  problem->new_keys = rows;
  problem->dtype = scores.dtype;
  problem->indices = static_cast<std::int32_t*>(indices.data);
  problem->scores = scores.data;
  problem->new_scores = new_scores.data;
  std::copy_n(new_scores.strides.begin(), 3, problem->new_score_strides);
  problem->positions = static_cast<const std::int32_t*>(new_keys.positions.data);
  problem->positions_stride = new_keys.positions.strides[0];
  return {};
}

}  // namespace flash_dmattn::internal
