// The rules of selections, packed documents and the intervals of masks.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>

#include "api/check_tensor.h"
#include "api/validate.h"

namespace flash_dmattn::internal {
namespace {

// Bounds of packed documents, (documents + 1), or (batch, documents + 1) where that may be.
Status check_cu_seqlens(const char* name, const TensorView& view, int most_dimensions, std::int64_t batch) {
  if (Status status = check_rank(name, view, 1, most_dimensions); !status.ok()) return status;
  if (view.dtype != DType::kInt32) return Status::invalid(name, "must be int32", show_dtype(name, view.dtype));
  if (Status status = check_memory(name, view, Layout::kAny); !status.ok()) return status;
  if (view.rank == 2 && view.shape[0] != batch) {
    return Status::invalid(name, "must be (documents + 1) or (B, documents + 1) with B = " + std::to_string(batch),
                           show(name, view));
  }
  const std::int64_t count = view.shape[view.rank - 1];
  if (count < 1) return Status::invalid(name, "must have at least one bound", show(name, view));
  return check_length(name, view, count);
}

DocumentBounds bounds_of(const TensorView& view) {
  return {.data = static_cast<const std::int32_t*>(view.data),
          .batch_stride = view.rank == 2 ? view.strides[0] : 0,
          .stride = view.strides[view.rank - 1]};
}

// Fills documents, row_bounds and key_bounds of a problem of either kind.
template <typename Problem>
Status read_documents(const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k, int most_dimensions,
                      std::int64_t batch, Problem* problem) {
  Status status = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, most_dimensions, batch);
  if (!status.ok()) return status;
  if (cu_seqlens_k.rank != 0) {
    status = check_all({{"cu_seqlens_k", &cu_seqlens_k, DType::kInt32, "of cu_seqlens_q", cu_seqlens_q.rank,
                         cu_seqlens_q.shape, Layout::kAny}});
    if (!status.ok()) return status;
  }
  problem->documents = cu_seqlens_q.shape[cu_seqlens_q.rank - 1] - 1;
  problem->row_bounds = bounds_of(cu_seqlens_q);
  problem->key_bounds = cu_seqlens_k.rank != 0 ? bounds_of(cu_seqlens_k) : problem->row_bounds;
  return {};
}

Status read_documents(const SelectionInputs& inputs, std::int64_t batch, SelectionProblem* problem) {
  const TensorView &rows = inputs.cu_seqlens_q, &keys = inputs.cu_seqlens_k;
  if (rows.rank == 0 && keys.rank == 0) return {};
  if (rows.rank == 0) {
    return Status::invalid("cu_seqlens_k", "needs cu_seqlens_q, where the documents' rows begin",
                           show("cu_seqlens_q", rows));
  }
  if (inputs.seqlens_k.rank != 0) {
    return Status::invalid("seqlens_k", "must not be given beside cu_seqlens_q, which says where keys end",
                           show("seqlens_k", inputs.seqlens_k) + ", " + show("cu_seqlens_q", rows));
  }
  return read_documents(rows, keys, 2, batch, problem);
}

Status check_seqlen_q(std::int64_t seqlen_q) {
  if (seqlen_q >= 0 && seqlen_q <= std::numeric_limits<std::int32_t>::max()) return {};
  return Status::invalid("seqlen_q", "must be between 0 and 2^31 - 1", "seqlen_q " + std::to_string(seqlen_q));
}

}  // namespace

Status make_selection_problem(const SelectionInputs& inputs, const SelectionOptions& options,
                              const KeyIntervals* intervals, SelectionProblem* problem) {
  *problem = {};
  const TensorView &scores = inputs.scores, &mask = inputs.key_mask;
  if (Status status = check_rank("scores", scores, 3, 3); !status.ok()) return status;
  if (!is_floating(scores.dtype)) {
    return Status::invalid("scores", "must be float16, bfloat16, float32 or float64",
                           show_dtype("scores", scores.dtype));
  }
  if (Status status = check_memory("scores", scores, Layout::kAny); !status.ok()) return status;
  const std::int64_t batch = scores.shape[0], heads = scores.shape[1], keys = scores.shape[2];
  if (options.window_size < 0) {
    return Status::invalid("window_size", "must not be negative", "window_size " + std::to_string(options.window_size));
  }
  if (Status status = check_seqlen_q(options.seqlen_q); !status.ok()) return status;
  if (Status status = check_length("scores", scores, keys); !status.ok()) return status;
  if (Status status = check_counts("scores", scores, batch, heads, keys); !status.ok()) return status;
  if (mask.rank != 0) {
    if (mask.rank == 2) {
      return Status::invalid("key_mask", "must have 3 dimensions", show_per_key("key_mask", mask, batch, keys));
    }
    if (Status status = check_rank("key_mask", mask, 3, 3); !status.ok()) return status;
    if (mask.dtype != DType::kBool) {
      return Status::invalid("key_mask", "must be bool", show_dtype("key_mask", mask.dtype));
    }
    if (Status status = check_memory("key_mask", mask, Layout::kAny); !status.ok()) return status;
    if ((mask.shape[0] != 1 && mask.shape[0] != batch) || (mask.shape[1] != 1 && mask.shape[1] != heads) ||
        mask.shape[2] != keys) {
      return Status::invalid("key_mask", "must be (B or 1, heads or 1, Sk) for scores (B, heads, Sk)",
                             show("key_mask", mask) + ", " + show("scores", scores));
    }
    for (int dim = 0; dim < 3; ++dim) problem->mask_strides[dim] = mask.shape[dim] == 1 ? 0 : mask.strides[dim];
    problem->key_mask = static_cast<const std::uint8_t*>(mask.data);
  }
  if (inputs.seqlens_k.rank != 0) {
    Status status = check_all({{"seqlens_k", &inputs.seqlens_k, DType::kInt32, "(B)", 1, {batch}, Layout::kAny}});
    if (!status.ok()) return status;
    problem->seqlens = static_cast<const std::int32_t*>(inputs.seqlens_k.data);
    problem->seqlens_stride = inputs.seqlens_k.strides[0];
  }
  if (Status status = read_documents(inputs, batch, problem); !status.ok()) return status;
  if (intervals != nullptr) {
    const Dims shape = {batch, heads, keys};
    Status status = check_all(
        {{"intervals.begin", &intervals->begin, DType::kInt32, "of the scores", 3, shape, Layout::kContiguous},
         {"intervals.end", &intervals->end, DType::kInt32, "of the scores", 3, shape, Layout::kContiguous}});
    if (!status.ok()) return status;
    problem->begin = static_cast<std::int32_t*>(intervals->begin.data);
    problem->end = static_cast<std::int32_t*>(intervals->end.data);
  }
  problem->batch = batch;
  problem->heads = heads;
  problem->keys = keys;
  problem->rows = options.seqlen_q;
  problem->window = options.window_size;
  problem->causal = options.causal;
  problem->scores = scores.data;
  problem->dtype = scores.dtype;
  for (int dim = 0; dim < 3; ++dim) problem->score_strides[dim] = scores.strides[dim];
  return {};
}

Status make_document_problem(const TensorView& cu_seqlens_q, const TensorView& cu_seqlens_k, std::int64_t seqlen_q,
                             bool causal, const KeyIntervals& intervals, DocumentIntervalsProblem* problem) {
  *problem = {};
  Status status = read_documents(cu_seqlens_q, cu_seqlens_k, 1, 1, problem);
  if (status.ok()) status = check_seqlen_q(seqlen_q);
  if (status.ok()) status = check_rank("intervals.begin", intervals.begin, 3, 3);
  if (!status.ok()) return status;
  const std::int64_t keys = intervals.begin.shape[2];
  const Dims shape = {1, 1, keys};
  status = check_all(
      {{"intervals.begin", &intervals.begin, DType::kInt32, "(1, 1, Sk)", 3, shape, Layout::kContiguous},
       {"intervals.end", &intervals.end, DType::kInt32, "of intervals.begin", 3, shape, Layout::kContiguous}});
  if (status.ok()) status = check_length("intervals.begin", intervals.begin, keys);
  if (!status.ok()) return status;
  problem->rows = seqlen_q;
  problem->keys = keys;
  problem->causal = causal;
  problem->begin = static_cast<std::int32_t*>(intervals.begin.data);
  problem->end = static_cast<std::int32_t*>(intervals.end.data);
  return {};
}

Status make_mask_intervals_problem(const TensorView& mask, const KeyIntervals* intervals,
                                   MaskIntervalsProblem* problem) {
  *problem = {};
  Status status = check_expected({"mask", &mask, DType::kBool, "(B, heads, Sq, Sk)", 4, mask.shape, Layout::kAny});
  if (status.ok()) status = check_length("mask", mask, std::max(mask.shape[2], mask.shape[3]));
  if (status.ok()) status = check_counts("mask", mask, mask.shape[0], mask.shape[1], mask.shape[3]);
  if (status.ok() && intervals != nullptr) {
    const Dims shape = {mask.shape[0], mask.shape[1], mask.shape[3]};
    status =
        check_all({{"intervals.begin", &intervals->begin, DType::kInt32, "of the mask", 3, shape, Layout::kContiguous},
                   {"intervals.end", &intervals->end, DType::kInt32, "of the mask", 3, shape, Layout::kContiguous}});
  }
  if (!status.ok()) return status;
  problem->batch = mask.shape[0];
  problem->heads = mask.shape[1];
  problem->rows = mask.shape[2];
  problem->keys = mask.shape[3];
  problem->mask = static_cast<const std::uint8_t*>(mask.data);
  std::copy_n(mask.strides.begin(), 4, problem->strides);
  if (intervals != nullptr) {
    problem->begin = static_cast<std::int32_t*>(intervals->begin.data);
    problem->end = static_cast<std::int32_t*>(intervals->end.data);
  }
  return {};
}

}  // namespace flash_dmattn::internal
