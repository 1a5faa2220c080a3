// Small calls of every kind through the library: forward, backward and plan. Whatever is visible, results are those of
// float64, the same bits for any number of workers, untouched by what nobody sees, and the work is what the plan
// reports. Entry point of libFuzzer (`make fuzz`); attention_test feeds the same function with pseudo-random bytes.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention_testing.h"
#include "flash_dmattn/plan.h"
#include "fuzzing.h"

namespace flash_dmattn::testing {
namespace {

void require(bool condition, const std::string& what, const Variant& variant) {
  if (condition) return;
  const Shape& s = variant.shape;
  std::fprintf(stderr, "%s: B %d, Sq %d, Sk %d, H %d, Hkv %d, D %d, Dv %d\n", what.c_str(), static_cast<int>(s.batch),
               static_cast<int>(s.rows), static_cast<int>(s.keys), static_cast<int>(s.heads),
               static_cast<int>(s.key_heads), static_cast<int>(s.head_dim), static_cast<int>(s.value_dim));
  std::abort();
}

void require_ok(const Status& status, const Variant& variant) { require(status.ok(), status.message(), variant); }

// A shape of the form (B, heads, Sq, Sk), (B, heads, Sk) or (Sq, Sk), any of its sizes 1; empty: none.
std::vector<std::int64_t> broadcast_shape(Decisions& decisions, const Shape& s) {
  const auto one_or = [&](std::int64_t full) { return decisions.byte() % 2 ? 1 : full; };
  const std::int64_t heads = one_or(decisions.byte() % 2 ? s.heads : s.key_heads);
  switch (decisions.byte() % 5) {
    case 0:
      return {one_or(s.rows), one_or(s.keys)};
    case 1:
      return {one_or(s.batch), heads, one_or(s.keys)};
    case 2:
      return {one_or(s.batch), heads, one_or(s.rows), one_or(s.keys)};
    default:
      return {};
  }
}

Variant make_variant(Decisions& decisions) {
  const auto chosen = [&](std::initializer_list<std::int64_t> sizes) {
    return sizes.begin()[decisions.byte() % sizes.size()];
  };
  const auto some = [&] { return decisions.byte() % 2 == 1; };
  Variant variant;
  Shape& s = variant.shape;
  s.batch = chosen({1, 1, 2});
  s.rows = decisions.byte() % 4 == 0 ? chosen({1, 16, 17, 63, 64, 65, 130}) : decisions.byte() % 40;
  s.keys = decisions.byte() % 4 == 0 ? chosen({64, 127, 129, 260, 1100}) : decisions.byte() % 70;
  s.key_heads = chosen({1, 2});
  s.heads = s.key_heads * chosen({1, 2, 3});
  s.head_dim = chosen({1, 4, 8, 19, 32, 40});
  s.value_dim = some() ? s.head_dim : chosen({1, 8, 24, 65});
  variant.is_causal = some();
  variant.softcap = decisions.rarely() ? 2.0 : 0.0;
  variant.density = decisions.byte() / 255.0;
  variant.mask = broadcast_shape(decisions, s);
  variant.bias = broadcast_shape(decisions, s);
  variant.float_bias = some();
  variant.sink = some();
  variant.float_sink = variant.sink && some();
  if (some()) {
    for (std::int64_t b = 0; b < s.batch; ++b) variant.seqlens.push_back(decisions.byte() % (s.keys + 2) - 1);
  }
  const auto of_heads = [&] { return chosen({1, s.key_heads, s.heads}); };
  if (some()) variant.intervals = {some() ? 1 : s.batch, of_heads(), s.keys};
  if (some()) {
    variant.indices = {some() ? 1 : s.batch, of_heads(), some() ? 1 : s.rows, decisions.byte() % 20};
    variant.has_lengths = some();
    variant.block_size = chosen({1, 1, 3, 64, 100});
  }
  return variant;
}

// Far above rounding: what is wrong by more was computed from other numbers.
double tolerance(DType dtype) {
  return dtype == DType::kFloat32 ? 1e-3 : dtype == DType::kFloat16 ? 3e-2 : dtype == DType::kBFloat16 ? 0.2 : 1e-9;
}

void require_close(const Call& got, const Call& expected, const Variant& variant) {
  const auto left = got.results(), right = expected.results();
  for (std::size_t i = 0; i < left.size(); ++i) {
    const Tensor &ours = *left[i].second, &reference = *right[i].second;
    // The coarser of the dtypes that it was computed in and rounded to.
    const double allowed = std::max(tolerance(got.query.dtype()), tolerance(ours.dtype()));
    double largest = std::max(1.0, 0.3 * std::sqrt(summands_of(left[i].first, got)));
    for (std::size_t at = 0; at < reference.count(); ++at) {
      if (std::isfinite(reference.get(at))) largest = std::max(largest, std::fabs(reference.get(at)));
    }
    for (std::size_t at = 0; at < reference.count(); ++at) {
      const double difference = std::fabs(ours.get(at) - reference.get(at));
      const bool close = ours.get(at) == reference.get(at) || difference <= allowed * largest;
      require(close,
              std::string(name_of(got.query.dtype())) + " " + left[i].first + "[" + std::to_string(at) + "] is " +
                  std::to_string(ours.get(at)) + ", float64's " + std::to_string(reference.get(at)),
              variant);
    }
  }
}

void run(Call* call, int workers, const Variant& variant, AttentionCounters* counters = nullptr) {
  SerialExecutor executor(workers);
  AttentionContext context{.executor = &executor, .counters = counters};
  require_ok(attention_forward(call->inputs(), call->options, call->outputs(), context), variant);
  context.counters = nullptr;
  require_ok(attention_backward(call->inputs(), call->cotangents(), call->options, call->gradients(), context),
             variant);
}

}  // namespace
}  // namespace flash_dmattn::testing

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace flash_dmattn;
  using namespace flash_dmattn::testing;
  Decisions decisions(data, size);
  const auto seed = decisions.raw<unsigned>();
  constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
  const DType dtype = kDTypes[decisions.byte() % 4];
  const Variant variant = make_variant(decisions);
  Call call(variant, dtype, seed);
  call.options.deterministic = decisions.byte() % 4 != 0;
  Call reference = call.in_float64();
  Call poisoned = call;
  if (call.query.count() > 0) poison_unseen(&poisoned);

  AttentionCounters counted;
  run(&call, 1, variant, &counted);
  run(&reference, 1, variant);
  require_close(call, reference, variant);
  const int workers = call.options.deterministic ? 3 : 1;
  run(&poisoned, workers, variant);
  const auto results = call.results(), others = poisoned.results();
  for (std::size_t i = 0; i < results.size(); ++i) {
    require(results[i].second->bytes() == others[i].second->bytes(),
            results[i].first + " depends on workers, or on what nobody sees", variant);
  }
  PlanReport report;
  SerialExecutor executor(1);
  require_ok(plan_report(call.inputs(), call.options, &report, {.executor = &executor}), variant);
  require(dtype == DType::kFloat64 || report.counters == counted, "the plan reports other work", variant);
  return 0;
}
