// Random views and options through the validation of every public call: it must come back, and what it accepts must be
// sound.
// Entry point of libFuzzer; validate_test feeds the same function with pseudo-random bytes.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <limits>

#include "api/validate.h"
#include "fuzzing.h"

namespace flash_dmattn::internal {
namespace {

using testing::Decisions;

std::int64_t any_size(Decisions& decisions) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  constexpr std::int64_t kSizes[] = {0,        1,    2,        3, 4, 8, 40, 256, 257, -1, std::int64_t{1} << 31,
                                     kMax / 2, kMax, -kMax - 1};
  const std::uint8_t choice = decisions.byte() % (std::size(kSizes) + 1);
  return choice < std::size(kSizes) ? kSizes[choice] : decisions.raw<std::int64_t>();
}

struct FuzzSizes {
  std::int64_t batch, rows, keys, heads, key_heads, head_dim, value_dim;
};

// Mostly a view of the wanted shape, with something broken now and then. Its memory is never touched.
TensorView view(Decisions& decisions, DType dtype, int rank, std::array<std::int64_t, 4> shape) {
  TensorView result;
  result.data = reinterpret_cast<void*>(std::uintptr_t{4096});
  result.dtype = dtype;
  result.rank = rank;
  result.shape = shape;
  std::uint64_t stride = 1;  // wraps around where the product overflows
  for (int dim = rank - 1; dim >= 0; --dim) {
    if (decisions.rarely()) result.shape[dim] = any_size(decisions);
    result.strides[dim] = decisions.rarely() ? any_size(decisions) : static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(result.shape[dim]);
  }
  if (decisions.rarely()) result.rank = decisions.raw<int>();
  if (decisions.rarely()) result.dtype = static_cast<DType>(decisions.byte());
  if (decisions.rarely()) result.data = reinterpret_cast<void*>(std::uintptr_t{decisions.byte()});
  return result;
}

// A mask or a bias in one of its forms, or none.
TensorView broadcast_view(Decisions& decisions, DType dtype, const FuzzSizes& s) {
  const auto one_or = [&](std::int64_t full) { return decisions.byte() % 2 ? 1 : full; };
  const std::int64_t heads = decisions.byte() % 2 ? s.heads : s.key_heads;
  switch (decisions.byte() % 4) {
    case 0:
      return {};
    case 1:
      return view(decisions, dtype, 2, {one_or(s.rows), one_or(s.keys)});
    case 2:
      return view(decisions, dtype, 3, {one_or(s.batch), one_or(heads), one_or(s.keys)});
    default:
      return view(decisions, dtype, 4, {one_or(s.batch), one_or(heads), one_or(s.rows), one_or(s.keys)});
  }
}

// Lists of keys, or none.
KeyIndices key_indices(Decisions& decisions, const FuzzSizes& s) {
  const auto one_or = [&](std::int64_t full) { return decisions.byte() % 2 ? 1 : full; };
  if (decisions.byte() % 2) return {};
  const std::int64_t heads = decisions.byte() % 2 ? s.heads : s.key_heads;
  KeyIndices indices;
  indices.indices = view(decisions, DType::kInt32, 4, {one_or(s.batch), one_or(heads), one_or(s.rows), 5});
  if (decisions.byte() % 2) {
    indices.lengths = view(decisions, DType::kInt32, 3, {one_or(s.batch), one_or(heads), one_or(s.rows), 0});
  }
  if (decisions.rarely()) indices.block_size = any_size(decisions);
  return indices;
}

// Intervals for attention, or none.
KeyIntervals key_intervals(Decisions& decisions, const FuzzSizes& s) {
  const auto one_or = [&](std::int64_t full) { return decisions.byte() % 2 ? 1 : full; };
  if (decisions.byte() % 2) return {};
  const auto bound = [&] {
    const std::int64_t heads = decisions.byte() % 2 ? s.heads : s.key_heads;
    return view(decisions, DType::kInt32, 3, {one_or(s.batch), one_or(heads), s.keys});
  };
  KeyIntervals intervals{bound(), bound()};
  if (decisions.rarely()) intervals.window_size = any_size(decisions);
  return intervals;
}

TensorView maybe(Decisions& decisions, const TensorView& tensor) {
  return decisions.byte() % 2 ? tensor : TensorView{};
}

void require(bool condition) {
  if (!condition) std::abort();
}

void require_sound(const BroadcastView& view, const AttentionProblem& p) {
  require(view.head_divisor > 0);
  require(p.heads == 0 || (p.heads - 1) / view.head_divisor < view.heads || view.heads == 0);
  require(view.rows == 1 || view.rows == p.rows);
  require(view.rows != 1 || view.row_stride == 0);
}

void require_sound_by_key(const BroadcastView& view, const AttentionProblem& p) {
  require_sound(view, p);
  require(view.keys == 1 || view.keys == p.keys);
  require(view.keys != 1 || view.key_stride == 0);
}

// Whether the arguments were accepted. If not, it is said what is wrong with them.
bool accepted(const Status& status) {
  require(status.ok() || (!status.argument().empty() && !status.rule().empty() && !status.values().empty()));
  return status.ok();
}

void require_sound(const Status& status, const AttentionProblem& p) {
  if (!accepted(status)) return;
  require(p.batch >= 0 && p.rows >= 0 && p.keys >= 0 && p.heads >= 0 && p.key_heads >= 0);
  require(p.head_dim >= 1 && p.head_dim <= 256 && p.value_dim >= 1 && p.value_dim <= 256);
  require(p.key_heads == 0 ? p.heads == 0 : p.heads % p.key_heads == 0);
  // None of these overflows, zeros or not.
  require(p.batch * p.heads < std::int64_t{1} << 31 && p.batch * p.key_heads < std::int64_t{1} << 31);
  require(p.group() <= 65536);
  require(p.batch * p.heads * p.rows < std::int64_t{1} << 44 && p.batch * p.heads * p.keys < std::int64_t{1} << 44);
  std::int64_t scores = 0;
  require(!__builtin_mul_overflow(p.batch * p.heads, p.rows * p.keys, &scores));
  if (p.visibility.mask.defined()) require_sound_by_key(p.visibility.mask, p);
  if (p.bias.defined()) require_sound_by_key(p.bias, p);
  const IntervalViews& intervals = p.visibility.intervals;
  require(intervals.window_size >= 0);
  // Bounds without elements may have no memory, and are never read.
  const bool has_keys = p.batch > 0 && p.heads > 0 && p.keys > 0;
  require(!has_keys || intervals.begin.defined() == intervals.end.defined());
  for (const BroadcastView& bound : {intervals.begin, intervals.end}) {
    if (bound.defined()) {
      require_sound_by_key(bound, p);
      require(bound.dtype == DType::kInt32 && bound.keys == p.keys && bound.row_stride == 0);
    }
  }
  const IndexViews& indices = p.visibility.indices;
  require(indices.block_size >= 0 && indices.block_size < std::int64_t{1} << 31);
  if (indices.entries.defined()) require_sound(indices.entries, p);
  if (indices.lengths.defined()) require_sound(indices.lengths, p);
  require(indices.defined() || !indices.lengths.defined());
  require(p.visibility.plan.data != nullptr || p.visibility.plan.bytes == 0);
  require(reinterpret_cast<std::uintptr_t>(p.visibility.plan.data) % kMemoryAlignment == 0);
}

// Sizes whose product is that of contiguous elements: none is negative, and their bytes are counted in 63 bits.
void require_countable(std::initializer_list<std::int64_t> sizes) {
  std::int64_t count = 8;
  for (const std::int64_t size : sizes) {
    require(size >= 0 && size <= std::int64_t{1} << 44);
    require(!__builtin_mul_overflow(count, std::max<std::int64_t>(size, 1), &count));
  }
}

constexpr std::int64_t kMaxIndex = std::numeric_limits<std::int32_t>::max();

bool is_floating_point(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 || dtype == DType::kFloat32 || dtype == DType::kFloat64;
}

void require_sound(const Status& status, const SelectionProblem& p, bool has_intervals) {
  if (!accepted(status)) return;
  require_countable({p.batch, p.heads, p.keys});
  require(p.window >= 0 && p.rows >= 0 && p.rows <= kMaxIndex && p.keys <= kMaxIndex && is_floating_point(p.dtype));
  require(p.documents >= 0 && (p.is_packed() || p.documents == 0 || p.batch == 0));
  require(p.is_packed() == (p.key_bounds.data != nullptr) || p.batch == 0);
  require(!p.is_packed() || p.seqlens == nullptr);
  const bool is_empty = p.batch == 0 || p.heads == 0 || p.keys == 0;
  require(is_empty || (p.scores != nullptr && has_intervals == (p.begin != nullptr && p.end != nullptr)));
}

void require_sound(const Status& status, const DocumentIntervalsProblem& p) {
  if (!accepted(status)) return;
  require(p.documents >= 0 && p.documents <= kMaxIndex && p.rows >= 0 && p.rows <= kMaxIndex);
  require(p.keys >= 0 && p.keys <= kMaxIndex);
  require(p.row_bounds.data != nullptr && p.key_bounds.data != nullptr);
  require(p.keys == 0 || (p.begin != nullptr && p.end != nullptr));
}

void require_sound(const Status& status, const KeptKeysProblem& p, bool has_lists) {
  if (!accepted(status)) return;
  require_countable({p.batch, p.heads, p.window});
  require_countable({p.batch, p.heads, p.new_keys, p.window});
  require(p.window <= kMaxIndex && p.new_keys <= kMaxNewKeys && is_floating_point(p.dtype));
  if (p.batch == 0 || p.heads == 0 || p.new_keys == 0) return;
  require(p.new_scores != nullptr && p.positions != nullptr);
  require(p.window == 0 || (p.indices != nullptr && p.scores != nullptr && has_lists == (p.lists != nullptr)));
}

void require_sound(const Status& status, const MaskIntervalsProblem& p, bool has_intervals) {
  if (!accepted(status)) return;
  require_countable({p.batch, p.heads, p.keys});
  require(p.rows >= 0 && p.rows <= kMaxIndex && p.keys <= kMaxIndex);
  if (p.batch == 0 || p.heads == 0 || p.keys == 0) return;
  require(has_intervals == (p.begin != nullptr && p.end != nullptr));
  require(p.rows == 0 || p.mask != nullptr);
}

std::int64_t small(Decisions& decisions) { return decisions.byte() % 4; }

std::int64_t size_or_any(Decisions& decisions, std::int64_t usual) {
  return decisions.rarely() ? any_size(decisions) : usual;
}

void attention_arguments(Decisions& decisions) {
  FuzzSizes s{};
  s.batch = size_or_any(decisions, small(decisions));
  s.rows = size_or_any(decisions, small(decisions) * 17);
  s.keys = size_or_any(decisions, small(decisions) * 31);
  s.key_heads = size_or_any(decisions, small(decisions));
  s.heads = decisions.rarely() ? any_size(decisions) : (s.key_heads % 1024) * small(decisions);
  s.head_dim = size_or_any(decisions, 1 + small(decisions) * 63);
  s.value_dim = decisions.byte() % 2 ? s.head_dim : size_or_any(decisions, 1 + small(decisions) * 63);
  constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};
  const DType dtype = kDTypes[decisions.byte() % 4];
  const DType bias_dtype = decisions.byte() % 2 ? dtype : DType::kFloat32;
  const DType lse_dtype = dtype == DType::kFloat64 ? dtype : DType::kFloat32;

  const auto query_like = [&] { return view(decisions, dtype, 4, {s.batch, s.rows, s.heads, s.head_dim}); };
  const auto key_like = [&] { return view(decisions, dtype, 4, {s.batch, s.keys, s.key_heads, s.head_dim}); };
  const auto out_like = [&] { return view(decisions, dtype, 4, {s.batch, s.rows, s.heads, s.value_dim}); };
  const auto value_like = [&] { return view(decisions, dtype, 4, {s.batch, s.keys, s.key_heads, s.value_dim}); };
  const auto lse_like = [&] { return view(decisions, lse_dtype, 3, {s.batch, s.heads, s.rows}); };

  AttentionInputs inputs{query_like(), key_like(), value_like()};
  inputs.visibility.mask = broadcast_view(decisions, DType::kBool, s);
  inputs.visibility.intervals = key_intervals(decisions, s);
  inputs.bias = broadcast_view(decisions, bias_dtype, s);
  inputs.visibility.indices = key_indices(decisions, s);
  inputs.sink = maybe(decisions, view(decisions, bias_dtype, 1, {s.heads}));
  inputs.visibility.seqlens_k = maybe(decisions, view(decisions, DType::kInt32, 1, {s.batch}));
  if (decisions.rarely()) {
    inputs.visibility.plan = {reinterpret_cast<void*>(std::uintptr_t{decisions.byte()}), decisions.byte()};
  }
  AttentionOptions options;
  if (decisions.byte() % 2) options.scale = decisions.rarely() ? decisions.raw<double>() : 0.5;
  options.softcap = decisions.rarely() ? decisions.raw<double>() : 0.0;
  inputs.visibility.is_causal = decisions.byte() % 2;

  ForwardProblem forward;
  const auto stats_like = [&] { return view(decisions, lse_dtype, 4, {s.batch, s.heads, s.rows, 2}); };
  const AttentionOutputs outputs{out_like(), lse_like(), maybe(decisions, stats_like())};
  require_sound(make_forward_problem(inputs, options, outputs, &forward), forward);

  const AttentionCotangents cotangents{out_like(), lse_like(), out_like(), maybe(decisions, lse_like()),
                                       maybe(decisions, stats_like())};
  AttentionGradients gradients{
      maybe(decisions, query_like()), maybe(decisions, key_like()), maybe(decisions, value_like()), {}};
  if (inputs.bias.rank >= 0 && inputs.bias.rank <= TensorView::kMaxRank && decisions.byte() % 2) {
    gradients.dbias = view(decisions, inputs.bias.dtype, inputs.bias.rank, inputs.bias.shape);
  }
  gradients.dsink = maybe(decisions, view(decisions, inputs.sink.dtype, 1, {s.heads}));
  BackwardProblem backward;
  require_sound(make_backward_problem(inputs, cotangents, options, gradients, &backward), backward);

  if (decisions.byte() % 2) inputs.value = {};  // which a plan does not need
  AttentionProblem planned;
  require_sound(make_planned_problem(inputs, options, &planned), planned);
}

TensorView cu_seqlens(Decisions& decisions, std::int64_t batch, std::int64_t count) {
  return decisions.byte() % 2 ? view(decisions, DType::kInt32, 1, {count})
                              : view(decisions, DType::kInt32, 2, {batch, count});
}

void selection_arguments(Decisions& decisions, DType dtype, std::int64_t batch, std::int64_t heads, std::int64_t keys) {
  const auto one_or = [&](std::int64_t full) { return decisions.byte() % 2 ? 1 : full; };
  SelectionInputs inputs{view(decisions, dtype, 3, {batch, heads, keys})};
  inputs.key_mask = maybe(decisions, view(decisions, DType::kBool, 3, {one_or(batch), one_or(heads), keys}));
  if (decisions.byte() % 4 == 0) inputs.seqlens_k = view(decisions, DType::kInt32, 1, {batch});
  const std::int64_t bounds = 1 + small(decisions);
  inputs.cu_seqlens_q = maybe(decisions, cu_seqlens(decisions, batch, bounds));
  inputs.cu_seqlens_k = maybe(decisions, cu_seqlens(decisions, batch, bounds));
  const SelectionOptions options{.window_size = size_or_any(decisions, small(decisions)),
                                 .seqlen_q = size_or_any(decisions, small(decisions) * 17)};
  const KeyIntervals intervals{view(decisions, DType::kInt32, 3, {batch, heads, keys}),
                               view(decisions, DType::kInt32, 3, {batch, heads, keys})};
  SelectionProblem problem;
  for (const KeyIntervals* written : {static_cast<const KeyIntervals*>(nullptr), &intervals}) {
    require_sound(make_selection_problem(inputs, options, written, &problem), problem, written != nullptr);
  }
}

void document_arguments(Decisions& decisions, std::int64_t keys) {
  const std::int64_t bounds = size_or_any(decisions, 1 + small(decisions));
  const TensorView rows = view(decisions, DType::kInt32, 1, {bounds});
  const TensorView cu_seqlens_k = maybe(decisions, view(decisions, DType::kInt32, 1, {bounds}));
  const KeyIntervals intervals{view(decisions, DType::kInt32, 3, {1, 1, keys}),
                               view(decisions, DType::kInt32, 3, {1, 1, keys})};
  DocumentIntervalsProblem problem;
  const std::int64_t seqlen_q = size_or_any(decisions, small(decisions) * 17);
  require_sound(make_document_problem(rows, cu_seqlens_k, seqlen_q, decisions.byte() % 2, intervals, &problem),
                problem);
}

void kept_keys_arguments(Decisions& decisions, DType dtype, std::int64_t batch, std::int64_t heads,
                         std::int64_t window) {
  const std::int64_t new_keys = size_or_any(decisions, decisions.byte() % 18);
  const NewKeys added{view(decisions, dtype, 3, {batch, heads, new_keys}), view(decisions, DType::kInt32, 1, {batch})};
  const KeptKeys kept{view(decisions, DType::kInt32, 3, {batch, heads, window}),
                      view(decisions, dtype, 3, {batch, heads, window})};
  const TensorView lists = maybe(decisions, view(decisions, DType::kInt32, 4, {batch, heads, new_keys, window}));
  KeptKeysProblem problem;
  require_sound(make_kept_keys_problem(added, kept, lists, &problem), problem, lists.rank != 0);
}

void mask_arguments(Decisions& decisions, std::int64_t batch, std::int64_t heads, std::int64_t keys) {
  const TensorView mask = view(decisions, DType::kBool, 4, {batch, heads, small(decisions) * 17, keys});
  const KeyIntervals intervals{view(decisions, DType::kInt32, 3, {batch, heads, keys}),
                               view(decisions, DType::kInt32, 3, {batch, heads, keys})};
  MaskIntervalsProblem problem;
  for (const KeyIntervals* written : {static_cast<const KeyIntervals*>(nullptr), &intervals}) {
    require_sound(make_mask_intervals_problem(mask, written, &problem), problem, written != nullptr);
  }
}

}  // namespace
}  // namespace flash_dmattn::internal

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flash_dmattn;
  using namespace flash_dmattn::internal;
  Decisions decisions(data, size);
  const std::uint8_t call = decisions.byte() % 8;
  if (call < 4) {
    attention_arguments(decisions);
    return 0;
  }
  constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};
  const DType dtype = kDTypes[decisions.byte() % 4];
  const std::int64_t batch = size_or_any(decisions, small(decisions));
  const std::int64_t heads = size_or_any(decisions, small(decisions));
  const std::int64_t keys = size_or_any(decisions, small(decisions) * 31);
  if (call == 4) selection_arguments(decisions, dtype, batch, heads, keys);
  if (call == 5) document_arguments(decisions, keys);
  if (call == 6) kept_keys_arguments(decisions, dtype, batch, heads, keys);
  if (call == 7) mask_arguments(decisions, batch, heads, keys);
  return 0;
}
