#include <algorithm>
#include <string>

#include "api/check_tensor.h"
#include "api/validate.h"

namespace flash_dmattn::internal {

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
