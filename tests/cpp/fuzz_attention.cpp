// Small calls of every kind through the library: forward, backward and plan. Whatever is visible, results are those of
// float64, the same bits for any number of workers, untouched by what nobody sees, and the work is what the plan
// reports. Entry point of libFuzzer (`make fuzz`); attention_test feeds the same function with pseudo-random bytes.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "attention_testing.h"
#include "flash_dmattn/plan.h"
#include "fuzzing.h"
#include "random_calls.h"

namespace flash_dmattn::testing {
namespace {

// Most calls are tiny, some cross what kernels cut at.
const RandomSizes kSizes = {.row_counts = {1, 16, 17, 63, 64, 65, 130},
                            .key_counts = {64, 127, 129, 260, 1100},
                            .most_rows = 39,
                            .most_keys = 69,
                            .head_dims = {1, 4, 8, 19, 32, 40},
                            .value_dims = {1, 8, 24, 65},
                            .most_entries = 19};

void require(bool condition, const std::string& what, const Variant& variant) {
  if (condition) return;
  const Shape& s = variant.shape;
  std::fprintf(stderr, "%s: B %d, Sq %d, Sk %d, H %d, Hkv %d, D %d, Dv %d\n", what.c_str(), static_cast<int>(s.batch),
               static_cast<int>(s.rows), static_cast<int>(s.keys), static_cast<int>(s.heads),
               static_cast<int>(s.key_heads), static_cast<int>(s.head_dim), static_cast<int>(s.value_dim));
  std::abort();
}

void require_ok(const Status& status, const Variant& variant) { require(status.ok(), status.message(), variant); }

void require_close(const Call& got, const Call& expected, const Variant& variant) {
  const std::string difference = first_difference(got, expected);
  require(difference.empty(), difference, variant);
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
  const Variant variant = make_variant(decisions, kSizes);
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
