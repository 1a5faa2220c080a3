// The PyTorch operators flash_dmattn::attention_forward, attention_backward, attention_plan, select_keys,
// append_kept_keys, mask_intervals, plan_report, plan_chunks, cpu_info, cuda_info, cuda_kernels and cuda_plan_bytes.
//
// Only this folder includes torch, and of torch only the stable ABI: one binary serves every later version and
// every CPython. What belongs to the operators but needs no C++ (shapes for torch.compile, autograd, autocast, vmap) is
// registered by python/flash_dmattn/_registrations.py.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "flash_dmattn/attention.h"
#include "flash_dmattn/info.h"
#include "flash_dmattn/kept_keys.h"
#include "flash_dmattn/plan.h"
#include "flash_dmattn/selection.h"
#include "tensors.h"
#include "visibility.h"

namespace {

using flash_dmattn::AttentionContext;
using flash_dmattn::AttentionCotangents;
using flash_dmattn::AttentionGradients;
using flash_dmattn::AttentionInputs;
using flash_dmattn::AttentionOptions;
using flash_dmattn::AttentionOutputs;
using flash_dmattn::AttentionPlan;
using flash_dmattn::DType;
using flash_dmattn::KeptKeys;
using flash_dmattn::KeyIntervals;
using flash_dmattn::NewKeys;
using flash_dmattn::PlannedChunk;
using flash_dmattn::PlanReport;
using flash_dmattn::SelectionContext;
using flash_dmattn::SelectionInputs;
using flash_dmattn::SelectionOptions;
using flash_dmattn::Status;
using flash_dmattn::TensorView;
using flash_dmattn::operators::as_contiguous;
using flash_dmattn::operators::CallDevice;
using flash_dmattn::operators::check;
using flash_dmattn::operators::dtype_of;
using flash_dmattn::operators::has_unit_head_dim;
using flash_dmattn::operators::make_empty;
using flash_dmattn::operators::ScalarType;
using flash_dmattn::operators::Tensor;
using flash_dmattn::operators::TorchDType;
using flash_dmattn::operators::TorchExecutor;
using flash_dmattn::operators::view_of;
using flash_dmattn::operators::visibility_schema;
using flash_dmattn::operators::VisibilityArguments;
using flash_dmattn::operators::with_unit_head_dim;
using flash_dmattn::operators::Workspace;

// Text as the operators return it: the codes of its characters, all of them ASCII. A string that crosses torch's stable
// ABI as the result of an operator is never freed (torch 2.11); a list of integers is.
using Codes = std::vector<std::int64_t>;

Codes codes_of(const std::string& text) { return Codes(text.begin(), text.end()); }

std::string joined(const std::vector<std::string>& names) {
  std::string line;
  for (const std::string& name : names) line += (line.empty() ? "" : " ") + name;
  return line;
}

constexpr const char* kFloatRule = "must be float16, bfloat16, float32 or float64";

KeyIntervals make_intervals(const std::optional<Tensor>& begin, const std::optional<Tensor>& end,
                            std::int64_t window_size = 0) {
  return {view_of("intervals.begin", begin, "must be int32"), view_of("intervals.end", end, "must be int32"),
          window_size};
}

// A tensor that attention_plan made; one without elements is none.
AttentionPlan plan_of(const std::optional<Tensor>& plan) {
  if (!plan || !plan->defined()) return {};
  const TorchDType dtype = dtype_of(*plan);
  if (dtype.code != aoti_torch_dtype_uint8() || plan->dim() != 1 || !plan->is_contiguous()) {
    check(Status::invalid("plan", "must be contiguous uint8 with 1 dimension",
                          std::string("plan ") + dtype.name + " with " + std::to_string(plan->dim()) + " dimensions"));
  }
  if (plan->numel() == 0) return {};
  return {plan->data_ptr(), static_cast<std::size_t>(plan->numel())};
}

AttentionInputs make_inputs(const Tensor& query, const Tensor& key, const Tensor& value,
                            const std::optional<Tensor>& bias, const std::optional<Tensor>& sink,
                            const VisibilityArguments& visibility) {
  return {.query = view_of("query", query, kFloatRule),
          .key = view_of("key", key, "must have query's dtype"),
          .value = view_of("value", value, "must have query's dtype"),
          .bias = view_of("bias", bias, "must have query's dtype or float32"),
          .sink = view_of("sink", sink, "must have query's dtype or float32"),
          .visibility = {.mask = view_of("mask", visibility.mask, "must be bool"),
                         .intervals = make_intervals(visibility.interval_begin, visibility.interval_end,
                                                     visibility.interval_window),
                         .indices = {view_of("indices", visibility.indices, "must be int32"),
                                     view_of("indices.lengths", visibility.index_lengths, "must be int32"),
                                     visibility.index_block_size},
                         .seqlens_k = view_of("seqlens_k", visibility.seqlens_k, "must be int32"),
                         .is_causal = visibility.is_causal,
                         .plan = plan_of(visibility.plan)}};
}

// The inputs with a stride of 1 along D, the only one that attention reads: query, key and value that have another are
// copied, but not for a call that is refused.
void copy_where_needed(const AttentionOptions& options, const AttentionContext& context, Tensor* query, Tensor* key,
                       Tensor* value, AttentionInputs* inputs) {
  if (has_unit_head_dim(*query) && has_unit_head_dim(*key) && has_unit_head_dim(*value)) return;
  AttentionInputs copied = *inputs;
  for (TensorView* view : {&copied.query, &copied.key, &copied.value}) view->strides[view->rank - 1] = 1;
  std::size_t bytes = 0;
  check(flash_dmattn::attention_forward_workspace(copied, options, context, &bytes));
  for (Tensor* tensor : {query, key, value}) *tensor = with_unit_head_dim(*tensor);
  inputs->query = view_of("query", *query, kFloatRule);
  inputs->key = view_of("key", *key, kFloatRule);
  inputs->value = view_of("value", *value, kFloatRule);
}

std::tuple<Tensor, Tensor, Tensor> attention_forward(
    Tensor query, Tensor key, Tensor value, std::optional<Tensor> bias, std::optional<Tensor> sink,
    std::optional<Tensor> mask, std::optional<Tensor> seqlens_k, std::optional<Tensor> interval_begin,
    std::optional<Tensor> interval_end, std::optional<Tensor> indices, std::optional<Tensor> index_lengths,
    std::optional<Tensor> plan, bool is_causal, std::int64_t interval_window, std::int64_t index_block_size,
    std::optional<double> scale, double softcap, bool deterministic) {
  const VisibilityArguments visibility = {mask,          seqlens_k, interval_begin,  interval_end,     indices,
                                          index_lengths, is_causal, interval_window, index_block_size, plan};
  const CallDevice device({"query", query}, {{"key", key}, {"value", value}, {"bias", bias}, {"sink", sink}},
                          visibility.tensors());
  const AttentionOptions options = {scale, softcap, deterministic};
  TorchExecutor executor;
  const AttentionContext context = {.executor = &executor, .device = device.native()};
  AttentionInputs inputs = make_inputs(query, key, value, bias, sink, visibility);
  copy_where_needed(options, context, &query, &key, &value, &inputs);

  // Also checks the inputs: from here on query and value have four dimensions.
  std::size_t bytes = 0;
  check(flash_dmattn::attention_forward_workspace(inputs, options, context, &bytes));
  const Workspace workspace(device, bytes);

  const std::int64_t out_sizes[] = {query.size(0), query.size(1), query.size(2), value.size(3)};
  const Tensor out = device.empty({out_sizes, 4}, query.scalar_type());
  const std::int64_t row_sizes[] = {query.size(0), query.size(2), query.size(1), 2};  // the last of row_stats only
  const bool is_double = inputs.query.dtype == DType::kFloat64;
  const ScalarType lse_dtype = is_double ? ScalarType::Double : ScalarType::Float;
  const Tensor lse = device.empty({row_sizes, 3}, lse_dtype), row_stats = device.empty({row_sizes, 4}, lse_dtype);
  const AttentionOutputs outputs = {.out = view_of("out", out, kFloatRule),
                                    .lse = view_of("lse", lse, kFloatRule),
                                    .row_stats = view_of("row_stats", row_stats, kFloatRule)};
  check(flash_dmattn::attention_forward(inputs, options, outputs, workspace.data(), workspace.bytes(), context));
  return {out, lse, row_stats};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> attention_backward(
    Tensor dout, std::optional<Tensor> dlse, Tensor out, Tensor lse, Tensor row_stats, Tensor query, Tensor key,
    Tensor value, std::optional<Tensor> bias, std::optional<Tensor> sink, std::optional<Tensor> mask,
    std::optional<Tensor> seqlens_k, std::optional<Tensor> interval_begin, std::optional<Tensor> interval_end,
    std::optional<Tensor> indices, std::optional<Tensor> index_lengths, std::optional<Tensor> plan, bool is_causal,
    std::int64_t interval_window, std::int64_t index_block_size, std::optional<double> scale, double softcap,
    bool deterministic, bool needs_dquery, bool needs_dkey, bool needs_dvalue, bool needs_dbias, bool needs_dsink) {
  if (needs_dbias && !bias) check(Status::invalid("needs_dbias", "needs a bias", "no bias"));
  if (needs_dsink && !sink) check(Status::invalid("needs_dsink", "needs a sink", "no sink"));
  const VisibilityArguments visibility = {mask,          seqlens_k, interval_begin,  interval_end,     indices,
                                          index_lengths, is_causal, interval_window, index_block_size, plan};
  const CallDevice device({"query", query},
                          {{"key", key},
                           {"value", value},
                           {"out", out},
                           {"lse", lse},
                           {"row_stats", row_stats},
                           {"dout", dout},
                           {"dlse", dlse},
                           {"bias", bias},
                           {"sink", sink}},
                          visibility.tensors());
  const AttentionOptions options = {scale, softcap, deterministic};
  TorchExecutor executor;
  const AttentionContext context = {.executor = &executor, .device = device.native()};
  AttentionInputs inputs = make_inputs(query, key, value, bias, sink, visibility);
  copy_where_needed(options, context, &query, &key, &value, &inputs);
  out = with_unit_head_dim(out);
  dout = with_unit_head_dim(dout);  // the gradient of a sum arrives expanded from one number
  if (lse.defined()) lse = as_contiguous(lse);
  if (row_stats.defined()) row_stats = as_contiguous(row_stats);
  constexpr const char* kLseRule = "must be float32 (float64 with float64)";
  const AttentionCotangents cotangents = {.out = view_of("out", out, "must have query's dtype"),
                                          .lse = view_of("lse", lse, kLseRule),
                                          .dout = view_of("dout", dout, "must have query's dtype"),
                                          .dlse = view_of("dlse", dlse, "must have lse's dtype"),
                                          .row_stats = view_of("row_stats", row_stats, kLseRule)};

  AttentionGradients gradients;
  const auto make_gradient = [&device](bool needed, const char* name, const Tensor& input, TensorView* view) {
    if (!needed) {
      const std::int64_t none = 0;
      return device.empty({&none, 1}, input.scalar_type());
    }
    Tensor gradient = device.empty_like_shape(input);
    *view = view_of(name, gradient, kFloatRule);
    return gradient;
  };
  const Tensor dquery = make_gradient(needs_dquery, "dquery", query, &gradients.dquery);
  const Tensor dkey = make_gradient(needs_dkey, "dkey", key, &gradients.dkey);
  const Tensor dvalue = make_gradient(needs_dvalue, "dvalue", value, &gradients.dvalue);
  const Tensor dbias = make_gradient(needs_dbias, "dbias", bias ? *bias : query, &gradients.dbias);
  const Tensor dsink = make_gradient(needs_dsink, "dsink", sink ? *sink : query, &gradients.dsink);

  std::size_t bytes = 0;
  check(flash_dmattn::attention_backward_workspace(inputs, cotangents, options, gradients, context, &bytes));
  const Workspace workspace(device, bytes);
  check(flash_dmattn::attention_backward(inputs, cotangents, options, gradients, workspace.data(), workspace.bytes(),
                                         context));
  return {dquery, dkey, dvalue, dbias, dsink};
}

std::tuple<Tensor, Tensor> select_keys(Tensor scores, std::int64_t window_size, std::int64_t seqlen_q, bool causal,
                                       std::optional<Tensor> key_mask, std::optional<Tensor> seqlens_k,
                                       std::optional<Tensor> cu_seqlens_q, std::optional<Tensor> cu_seqlens_k) {
  const CallDevice device({"scores", scores}, {{"key_mask", key_mask},
                                               {"seqlens_k", seqlens_k},
                                               {"cu_seqlens_q", cu_seqlens_q},
                                               {"cu_seqlens_k", cu_seqlens_k}});
  const SelectionInputs inputs = {.scores = view_of("scores", scores, kFloatRule),
                                  .key_mask = view_of("key_mask", key_mask, "must be bool"),
                                  .seqlens_k = view_of("seqlens_k", seqlens_k, "must be int32"),
                                  .cu_seqlens_q = view_of("cu_seqlens_q", cu_seqlens_q, "must be int32"),
                                  .cu_seqlens_k = view_of("cu_seqlens_k", cu_seqlens_k, "must be int32")};
  const SelectionOptions options = {.window_size = window_size, .seqlen_q = seqlen_q, .causal = causal};
  TorchExecutor executor;
  const SelectionContext context = {.executor = &executor, .device = device.native()};

  std::size_t bytes = 0;
  check(flash_dmattn::select_keys_workspace(inputs, options, context, &bytes));
  const Workspace workspace(device, bytes);

  const Tensor begin = device.empty(scores.sizes(), ScalarType::Int);
  const Tensor end = device.empty(scores.sizes(), ScalarType::Int);
  check(flash_dmattn::select_keys(inputs, options, make_intervals(begin, end), workspace.data(), workspace.bytes(),
                                  context));
  return {begin, end};
}

// Writes to indices, scores and lengths.
Tensor append_kept_keys(Tensor indices, Tensor scores, Tensor new_scores, Tensor positions,
                        std::optional<Tensor> lengths, std::optional<Tensor> cache_scores) {
  const CallDevice device({"indices", indices}, {{"scores", scores},
                                                 {"new_scores", new_scores},
                                                 {"positions", positions},
                                                 {"lengths", lengths},
                                                 {"cache_scores", cache_scores}});
  const KeptKeys kept = {.indices = view_of("indices", indices, "must be int32"),
                         .scores = view_of("scores", scores, kFloatRule),
                         .lengths = view_of("lengths", lengths, "must be int32")};
  const NewKeys new_keys = {.scores = view_of("new_scores", new_scores, "must have the dtype of scores"),
                            .positions = view_of("positions", positions, "must be int32"),
                            .cache_scores = view_of("cache_scores", cache_scores, "must have the dtype of scores")};
  // Sizes of other ranks or of too many keys are refused by the library, which looks at the lists last.
  const auto last_size = [](const TensorView& view) { return view.shape[std::max(view.rank, 1) - 1]; };
  const std::int64_t rows = std::min(last_size(new_keys.scores), flash_dmattn::kMaxNewKeys);
  const std::int64_t sizes[] = {kept.indices.shape[0], kept.indices.shape[1], rows, last_size(kept.indices)};
  TorchExecutor executor;
  const SelectionContext context = {.executor = &executor, .device = device.native()};
  const Tensor lists = device.empty({sizes, 4}, ScalarType::Int);
  check(flash_dmattn::append_kept_keys(new_keys, kept, view_of("lists", lists, "must be int32"), context));
  return lists;
}

std::tuple<Tensor, Tensor, bool> mask_intervals(Tensor mask, bool is_causal) {
  const CallDevice device({"mask", mask}, {});
  const TensorView view = view_of("mask", mask, "must be bool");
  if (view.rank != 4) check(Status::invalid("mask", "must have 4 dimensions", std::to_string(view.rank)));
  TorchExecutor executor;
  const SelectionContext context = {.executor = &executor, .device = device.native()};

  std::size_t bytes = 0;
  check(flash_dmattn::mask_intervals_workspace(view, {}, context, &bytes));
  const Workspace workspace(device, bytes);
  const std::int64_t sizes[] = {view.shape[0], view.shape[1], view.shape[3]};
  const Tensor begin = device.empty({sizes, 3}, ScalarType::Int), end = device.empty({sizes, 3}, ScalarType::Int);
  const KeyIntervals intervals = make_intervals(begin, end);
  bool exact = false;
  check(flash_dmattn::mask_intervals(view, is_causal, intervals, &exact, workspace.data(), workspace.bytes(), context));
  return {begin, end, exact};
}

// For plans, which read the sizes of query and key only: any strides will do.
AttentionInputs make_planned_inputs(const Tensor& query, const Tensor& key, const VisibilityArguments& visibility) {
  AttentionInputs inputs = make_inputs(query, key, key, {}, {}, visibility);
  for (TensorView* view : {&inputs.query, &inputs.key, &inputs.value}) view->strides[view->rank - 1] = 1;
  return inputs;
}

// uint8; no elements where there is nothing to plan.
Tensor attention_plan(Tensor query, Tensor key, std::optional<Tensor> mask, std::optional<Tensor> seqlens_k,
                      std::optional<Tensor> interval_begin, std::optional<Tensor> interval_end,
                      std::optional<Tensor> indices, std::optional<Tensor> index_lengths, bool is_causal,
                      std::int64_t interval_window, std::int64_t index_block_size) {
  const VisibilityArguments visibility = {mask,          seqlens_k, interval_begin,  interval_end,    indices,
                                          index_lengths, is_causal, interval_window, index_block_size};
  const CallDevice device({"query", query}, {{"key", key}}, visibility.tensors());
  const AttentionInputs inputs = make_planned_inputs(query, key, visibility);
  const AttentionContext context = {.device = device.native()};

  std::size_t bytes = 0, workspace_bytes = 0;
  check(flash_dmattn::attention_plan_bytes(inputs, {}, context, &bytes));
  check(flash_dmattn::attention_plan_workspace(inputs, {}, context, &workspace_bytes));
  const Workspace workspace(device, workspace_bytes);
  const auto size = static_cast<std::int64_t>(bytes);
  const Tensor plan = device.empty({&size, 1}, ScalarType::Byte);
  check(flash_dmattn::make_attention_plan(inputs, {}, plan.data_ptr(), bytes, workspace.data(), workspace.bytes(),
                                          context));
  return plan;
}

// How many elements attention_plan gives on a GPU for arguments of these sizes and strides, wherever they are.
std::int64_t cuda_plan_bytes(Tensor query, Tensor key, std::optional<Tensor> mask, std::optional<Tensor> seqlens_k,
                             std::optional<Tensor> interval_begin, std::optional<Tensor> interval_end,
                             std::optional<Tensor> indices, std::optional<Tensor> index_lengths, bool is_causal,
                             std::int64_t interval_window, std::int64_t index_block_size) {
  const VisibilityArguments visibility = {mask,          seqlens_k, interval_begin,  interval_end,    indices,
                                          index_lengths, is_causal, interval_window, index_block_size};
  const AttentionInputs inputs = make_planned_inputs(query, key, visibility);
  const AttentionContext context = {.device = flash_dmattn::Device::cuda(nullptr)};
  std::size_t bytes = 0;
  check(flash_dmattn::attention_plan_bytes(inputs, {}, context, &bytes));
  return static_cast<std::int64_t>(bytes);
}

// The names and values of the counts, backend and rule: the fields of PlanReport in python/flash_dmattn/planning.py.
// What C++ counts under other names is translated here and nowhere else.
std::tuple<Codes, std::vector<std::int64_t>, Codes, Codes> plan_report(
    Tensor query, Tensor key, std::optional<Tensor> mask, std::optional<Tensor> seqlens_k,
    std::optional<Tensor> interval_begin, std::optional<Tensor> interval_end, std::optional<Tensor> indices,
    std::optional<Tensor> index_lengths, bool is_causal, std::int64_t interval_window, std::int64_t index_block_size,
    bool deterministic) {
  const VisibilityArguments visibility = {mask,          seqlens_k, interval_begin,  interval_end,    indices,
                                          index_lengths, is_causal, interval_window, index_block_size};
  const CallDevice device({"query", query}, {{"key", key}}, visibility.tensors());
  const AttentionInputs inputs = make_planned_inputs(query, key, visibility);
  const AttentionOptions options = {.deterministic = deterministic};
  TorchExecutor executor;
  const AttentionContext context = {.executor = &executor, .device = device.native()};

  std::size_t bytes = 0;
  check(flash_dmattn::plan_report_workspace(inputs, options, context, &bytes));
  const Workspace workspace(device, bytes);
  PlanReport report;
  check(flash_dmattn::plan_report(inputs, options, &report, workspace.data(), workspace.bytes(), context));
  const flash_dmattn::AttentionCounters& counted = report.counters;
  const std::pair<const char*, std::int64_t> named_counts[] = {
      {"kept_scores", counted.kept_scores},
      {"computed_scores", counted.computed_scores},
      {"tiles_empty", counted.tiles_empty},
      {"tiles_partial", counted.tiles_partial},
      {"tiles_full", counted.tiles_visited - counted.tiles_partial},
      {"copied_keys", counted.copied_keys},
      {"plan_bytes", static_cast<std::int64_t>(report.plan_bytes)},
      {"plans", counted.plans},
      {"lists", counted.lists},
      {"bitmaps", counted.bitmaps},
      {"chunk_rows", report.chunk_rows},
      {"row_tile", report.row_tile},
      {"key_tile", report.key_tile},
      {"shared_heads", report.shared_heads},
  };
  std::vector<std::string> names;
  std::vector<std::int64_t> counts;
  for (const auto& [name, count] : named_counts) {
    names.emplace_back(name);
    counts.push_back(count);
  }
  return {codes_of(joined(names)), std::move(counts), codes_of(report.backend), codes_of(report.rule)};
}

// One int64 row (row_begin, rows, listed keys, is_list, has_bitmap, row_tile, key_tile) a chunk, and the keys (int32),
// visible (bool) and tiles (uint8: 0 empty, 1 partial, 2 full) of all chunks behind one another.
std::tuple<Tensor, Tensor, Tensor, Tensor> plan_chunks(
    Tensor query, Tensor key, std::optional<Tensor> mask, std::optional<Tensor> seqlens_k,
    std::optional<Tensor> interval_begin, std::optional<Tensor> interval_end, std::optional<Tensor> indices,
    std::optional<Tensor> index_lengths, bool is_causal, std::int64_t interval_window, std::int64_t index_block_size,
    std::int64_t batch, std::int64_t head) {
  const VisibilityArguments visibility = {mask,          seqlens_k, interval_begin,  interval_end,    indices,
                                          index_lengths, is_causal, interval_window, index_block_size};
  const AttentionInputs inputs = make_planned_inputs(query, key, visibility);
  TorchExecutor executor;
  // The same chunks for any number of threads.
  const AttentionOptions options = {.deterministic = true};
  std::vector<PlannedChunk> chunks;
  check(flash_dmattn::plan_chunks(inputs, options, batch, head, &chunks, {.executor = &executor}));

  std::vector<std::int64_t> table;
  std::vector<std::int32_t> keys;
  std::vector<std::uint8_t> visible;
  std::vector<PlannedChunk::Tile> tiles;
  for (const PlannedChunk& chunk : chunks) {
    for (const std::int64_t entry :
         {chunk.row_begin, std::int64_t{chunk.rows}, static_cast<std::int64_t>(chunk.keys.size()),
          std::int64_t{chunk.is_list}, std::int64_t{chunk.has_bitmap}, std::int64_t{chunk.row_tile},
          std::int64_t{chunk.key_tile}}) {
      table.push_back(entry);
    }
    keys.insert(keys.end(), chunk.keys.begin(), chunk.keys.end());
    visible.insert(visible.end(), chunk.visible.begin(), chunk.visible.end());
    tiles.insert(tiles.end(), chunk.tiles.begin(), chunk.tiles.end());
  }
  const auto copied = [](const auto& values, ScalarType dtype) {
    const auto size = static_cast<std::int64_t>(values.size());
    Tensor tensor = make_empty({&size, 1}, dtype, torch::stable::Device(torch::headeronly::DeviceType::CPU));
    std::copy_n(reinterpret_cast<const std::byte*>(values.data()), values.size() * sizeof(values[0]),
                static_cast<std::byte*>(tensor.data_ptr()));
    return tensor;
  };
  return {copied(table, ScalarType::Long), copied(keys, ScalarType::Int), copied(visible, ScalarType::Bool),
          copied(tiles, ScalarType::Byte)};
}

// A field a line, the entries of a list side by side.
Codes cpu_info() {
  const flash_dmattn::CpuInfo info = flash_dmattn::cpu_info();
  return codes_of(std::string(flash_dmattn::version()) + "\n" + info.isa_float + "\n" + info.isa_bfloat16 + "\n" +
                  joined(info.compiled) + "\n" + joined(info.supported));
}

std::tuple<std::int64_t, Codes> cuda_info() {
  const flash_dmattn::CudaInfo info = flash_dmattn::cuda_info();
  return {info.toolkit, codes_of(joined(info.architectures))};
}

Codes cuda_kernels(std::int64_t major, std::int64_t minor) {
  for (const auto& [name, number] : {std::pair("major", major), std::pair("minor", minor)}) {
    if (number >= 0 && number < 1000) continue;
    check(Status::invalid(name, "must be a number of a compute capability", name + (" " + std::to_string(number))));
  }
  return codes_of(flash_dmattn::cuda_kernels(static_cast<int>(major), static_cast<int>(minor)));
}

}  // namespace

STABLE_TORCH_LIBRARY(flash_dmattn, library) {
  const std::string attended = "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? sink, " +
                               visibility_schema(true) + ", float? scale, float softcap, bool deterministic";
  const std::string planned = "Tensor query, Tensor key, " + visibility_schema(false);
  const auto define = [&library](const std::string& schema) { library.def(schema.c_str()); };
  define("attention_forward(" + attended + ") -> (Tensor out, Tensor lse, Tensor row_stats)");
  // Gradients that are not asked for come back with no elements.
  define("attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor row_stats, " + attended +
         ", bool needs_dquery, bool needs_dkey, bool needs_dvalue, bool needs_dbias, bool needs_dsink) "
         "-> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dbias, Tensor dsink)");
  define("attention_plan(" + planned + ") -> Tensor");
  define(
      "select_keys(Tensor scores, SymInt window_size, SymInt seqlen_q, bool causal, Tensor? key_mask, "
      "Tensor? seqlens_k, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None) -> (Tensor begin, Tensor end)");
  define(
      "append_kept_keys(Tensor(a!) indices, Tensor(b!) scores, Tensor new_scores, Tensor positions, "
      "Tensor(c!)? lengths=None, Tensor? cache_scores=None) -> Tensor lists");
  define("mask_intervals(Tensor mask, bool is_causal) -> (Tensor begin, Tensor end, bool exact)");
  define("plan_report(" + planned + ", bool deterministic) -> (int[] names, int[] counts, int[] backend, int[] rule)");
  define("plan_chunks(" + planned +
         ", int batch, int head) -> (Tensor chunks, Tensor keys, Tensor visible, Tensor tiles)");
  define("cpu_info() -> int[] lines");
  define("cuda_info() -> (int toolkit, int[] architectures)");
  define("cuda_kernels(int major, int minor) -> int[]");
  define("cuda_plan_bytes(" + planned + ") -> int");
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CPU, library) {
  library.impl("attention_forward", TORCH_BOX(&attention_forward));
  library.impl("attention_backward", TORCH_BOX(&attention_backward));
  library.impl("attention_plan", TORCH_BOX(&attention_plan));
  library.impl("select_keys", TORCH_BOX(&select_keys));
  library.impl("append_kept_keys", TORCH_BOX(&append_kept_keys));
  library.impl("mask_intervals", TORCH_BOX(&mask_intervals));
  library.impl("plan_report", TORCH_BOX(&plan_report));
  library.impl("plan_chunks", TORCH_BOX(&plan_chunks));
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CUDA, library) {
  library.impl("attention_forward", TORCH_BOX(&attention_forward));
  library.impl("attention_backward", TORCH_BOX(&attention_backward));
  library.impl("attention_plan", TORCH_BOX(&attention_plan));
  library.impl("select_keys", TORCH_BOX(&select_keys));
  library.impl("append_kept_keys", TORCH_BOX(&append_kept_keys));
  library.impl("mask_intervals", TORCH_BOX(&mask_intervals));
  library.impl("plan_report", TORCH_BOX(&plan_report));
}

STABLE_TORCH_LIBRARY_IMPL(flash_dmattn, CompositeExplicitAutograd, library) {
  library.impl("cpu_info", TORCH_BOX(&cpu_info));
  library.impl("cuda_info", TORCH_BOX(&cuda_info));
  library.impl("cuda_kernels", TORCH_BOX(&cuda_kernels));
  library.impl("cuda_plan_bytes", TORCH_BOX(&cuda_plan_bytes));
}
