#include "cpu/dispatch.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/arena.h"
#include "core/log.h"
#include "cpu/backend.h"
#include "cpu/config.h"
#include "cpu/workers.h"
#include "flash_dmattn/info.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flash_dmattn::internal::cpu {
namespace {

bool always() { return true; }

#if defined(__x86_64__)
// The builtin does not know it in every compiler.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kF16c = 1u << 29;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & kF16c) != 0;
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("aes") &&
         __builtin_cpu_supports("pclmul");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

// Intel's cores run two single precision multiply-adds in the time of one bfloat16 dot product, whose two
// products a lane then gain nothing over converting while packing (measured: 240 against 120 GFLOPS a core on
// Sapphire Rapids). AMD's run both at the same rate.
bool dot_products_pay() { return __builtin_cpu_is("amd") != 0; }

bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Matrix tiles keep eight kilobytes of state per thread, which Linux grants on request, to the whole
// process.
bool request_tile_permission() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  if ((edx & kAmxBf16) == 0 || (edx & kAmxTile) == 0) return false;
  return has_avx512_bf16() && request_tile_permission();
}
#endif

struct Candidate {
  const KernelSet* set;
  bool (*supported)();
  bool (*preferred)();  // otherwise it is only used when FLASH_DMATTN_ISA names it
};

// Fastest first.
const Candidate kCandidates[] = {
#if defined(__x86_64__)
    {&kAmxKernels, has_amx, always},       {&kAvx512Bf16Kernels, has_avx512_bf16, dot_products_pay},
    {&kAvx512Kernels, has_avx512, always}, {&kAvx2Kernels, has_avx2, always},
#endif
    {&kBaselineKernels, always, always},
};

// Usable sets, fastest first, from the one that FLASH_DMATTN_ISA names on.
std::vector<const KernelSet*> find_usable_sets() {
  const char* cap = std::getenv("FLASH_DMATTN_ISA");
  if (cap != nullptr && std::none_of(std::begin(kCandidates), std::end(kCandidates), [&](const Candidate& candidate) {
        return std::strcmp(cap, candidate.set->name) == 0;
      })) {
    if (*cap != '\0') {
      std::fprintf(stderr, "flash_dmattn: FLASH_DMATTN_ISA=%s names no kernel set of this build; it is ignored\n", cap);
    }
    cap = nullptr;
  }
  bool below_cap = cap == nullptr;
  std::vector<const KernelSet*> usable;
  for (const Candidate& candidate : kCandidates) {
    const bool named = cap != nullptr && std::strcmp(cap, candidate.set->name) == 0;
    below_cap = below_cap || named;
    if (below_cap && candidate.supported() && (named || candidate.preferred())) usable.push_back(candidate.set);
  }
  return usable;
}

const Kernels& kernels_for(const KernelSet& set, DType dtype) {
  return dtype == DType::kBFloat16 ? set.bfloat16 : dtype == DType::kFloat16 ? set.float16 : set.float32;
}

ChosenKernels find_kernels(DType dtype) {
  static const std::vector<const KernelSet*> usable = find_usable_sets();
  for (const KernelSet* set : usable) {
    if (kernels_for(*set, dtype).defined()) return {set, &kernels_for(*set, dtype)};
  }
  return {};
}

bool streams(const AttentionProblem& problem) {
  return is_decode(problem, choose_kernels(problem.dtype).kernels->multiplies_pairs);
}

// How a call is computed, and where its memory lies. With an arena that measures, what it leaves used is the workspace.
struct ForwardSetup {
  ChosenKernels chosen;
  ForwardSchedule schedule;
  int workers;
  void* indices;
  WorkerScratch scratch;

  ForwardSetup(const AttentionProblem& problem, const Executor& executor, Arena* arena)
      : chosen(choose_kernels(problem.dtype)),
        schedule(make_forward_schedule(problem, executor.concurrency())),
        workers(worker_count(problem, schedule.units, executor)),
        indices(arena->take<std::byte>(IntervalIndices::bytes(problem))),
        scratch(workers, chosen.kernels->forward_scratch(problem, schedule), arena) {}
};

// The same for few query rows.
struct DecodeSetup {
  ChosenKernels chosen;
  DecodeSchedule schedule;
  int workers;
  void* lists;
  DecodeParts parts;
  WorkerScratch scratch;

  DecodeSetup(const AttentionProblem& problem, const Executor& executor, Arena* arena)
      : chosen(choose_kernels(problem.dtype)),
        schedule(make_decode_schedule(problem)),
        workers(decode_worker_count(problem, schedule, executor.concurrency())),
        lists(arena->take<std::byte>(IndexRows::bytes(problem))),
        parts(problem, schedule, arena),
        scratch(workers, chosen.kernels->decode_scratch(problem, schedule), arena) {}
};

struct BackwardSetup {
  ChosenKernels chosen;
  BackwardSchedule schedule;
  int workers;
  void* indices;
  void* sums;  // shared by all units
  WorkerScratch scratch;

  BackwardSetup(const BackwardProblem& problem, const Executor& executor, Arena* arena)
      : chosen(choose_kernels(problem.dtype)),
        schedule(make_backward_schedule(problem, executor.concurrency())),
        workers(worker_count(problem, schedule.units, executor)),
        indices(arena->take<std::byte>(IntervalIndices::bytes(problem))),
        sums(arena->take<std::byte>(chosen.kernels->backward_sums(problem, schedule))),
        scratch(workers, chosen.kernels->backward_scratch(problem, schedule), arena) {}
};

template <typename Schedule>
std::string describe_cut(const Schedule& schedule) {
  return "chunks of " + std::to_string(schedule.chunk_rows) + " rows";
}
std::string describe_cut(const DecodeSchedule& schedule) {
  return "decode, splits of " + std::to_string(schedule.split_keys) + " keys";
}

// Printed when the work is done, since what was planned depends on the mask's elements.
template <typename Setup>
void log_call(const char* direction, const AttentionProblem& problem, const Setup& setup,
              const AttentionCounters& counted) {
  const bool bits = counted.bitmaps > 0;
  const double kept = static_cast<double>(counted.kept_scores);
  std::fprintf(stderr,
               "flash_dmattn: cpu/%s %s: %s x %d heads, %lld units, %d workers; plans: %lld list, %lld "
               "range, %s, %.2f computed per kept score (%s)\n",
               setup.chosen.set->name, describe_call(direction, problem).c_str(), describe_cut(setup.schedule).c_str(),
               setup.schedule.pass_heads, static_cast<long long>(setup.schedule.units), setup.workers,
               static_cast<long long>(counted.lists), static_cast<long long>(counted.plans - counted.lists),
               bits ? "bitmap" : "prefix", kept > 0 ? static_cast<double>(counted.computed_scores) / kept : 0.0,
               plan_rule(problem.visibility));
}

void decode(const ForwardProblem& problem, void* workspace, Executor& executor, AttentionCounters* counters) {
  Arena arena(workspace);
  const DecodeSetup setup(problem, executor, &arena);
  const Kernels& kernels = *setup.chosen.kernels;
  const bool logs = logging();
  WorkerCounters counted(counters != nullptr || logs ? setup.workers : 0);
  const IndexRows lists = build_lists(problem, setup.lists, setup.workers, executor);
  setup.parts.start();
  run_units(setup.schedule.units, setup.workers, executor, kernels, [&](std::int64_t unit, int worker) {
    kernels.decode_unit(problem, lists, setup.schedule, setup.parts, unit, setup.scratch.of(worker),
                        counted.of(worker));
  });
  const AttentionCounters sum = counted.sum(problem, kDecodeRows);
  if (counters != nullptr) add_counters(sum, counters);
  if (logs) log_call("forward", problem, setup, sum);
}

}  // namespace

ChosenKernels choose_kernels(DType dtype) {
  static const std::array<ChosenKernels, 3> chosen = {find_kernels(DType::kFloat32), find_kernels(DType::kFloat16),
                                                      find_kernels(DType::kBFloat16)};
  return chosen[dtype == DType::kFloat32 ? 0 : dtype == DType::kFloat16 ? 1 : 2];
}

std::size_t forward_workspace(const AttentionProblem& problem, const Executor& executor) {
  Arena arena(nullptr);
  if (streams(problem)) {
    DecodeSetup(problem, executor, &arena);
  } else {
    ForwardSetup(problem, executor, &arena);
  }
  return arena.used();
}

void forward(const ForwardProblem& problem, void* workspace, Executor& executor, AttentionCounters* counters) {
  if (streams(problem)) return decode(problem, workspace, executor, counters);
  Arena arena(workspace);
  const ForwardSetup setup(problem, executor, &arena);
  const ForwardSchedule& schedule = setup.schedule;
  const Kernels& kernels = *setup.chosen.kernels;
  const bool logs = logging();
  const IntervalIndices indices = build_indices(problem, setup.indices, executor);
  WorkerCounters counted(counters != nullptr || logs ? setup.workers : 0);
  run_units(schedule.units, setup.workers, executor, kernels, [&](std::int64_t unit, int worker) {
    kernels.forward_unit(problem, schedule, indices, unit, setup.scratch.of(worker), counted.of(worker));
  });
  const AttentionCounters sum = counted.sum(problem, kForwardRowTile);
  if (counters != nullptr) add_counters(sum, counters);
  if (logs) log_call("forward", problem, setup, sum);
}

std::size_t backward_workspace(const BackwardProblem& problem, const Executor& executor) {
  Arena arena(nullptr);
  BackwardSetup(problem, executor, &arena);
  return arena.used();
}

void backward(const BackwardProblem& problem, void* workspace, Executor& executor, AttentionCounters* counters) {
  Arena arena(workspace);
  const BackwardSetup setup(problem, executor, &arena);
  const BackwardSchedule& schedule = setup.schedule;
  const Kernels& kernels = *setup.chosen.kernels;
  const bool logs = logging();
  const IntervalIndices indices = build_indices(problem, setup.indices, executor);
  WorkerCounters counted(counters != nullptr || logs ? setup.workers : 0);
  run_units(schedule.units, setup.workers, executor, kernels, [&](std::int64_t unit, int worker) {
    kernels.backward_unit(problem, schedule, indices, unit, setup.sums, setup.scratch.of(worker), counted.of(worker));
  });
  const std::int64_t parts = kernels.finish_parts(problem, schedule);
  if (parts > 0) {
    run_units(parts, worker_count(problem, parts, executor), executor, kernels,
              [&](std::int64_t part, int) { kernels.finish_part(problem, schedule, part, setup.sums); });
  }
  const AttentionCounters sum = counted.sum(problem, kBackwardRowTile);
  if (counters != nullptr) add_counters(sum, counters);
  if (logs) log_call("backward", problem, setup, sum);
}

}  // namespace flash_dmattn::internal::cpu

namespace flash_dmattn {

CpuInfo cpu_info() {
  namespace cpu = internal::cpu;
  CpuInfo info;
  info.isa_float = cpu::choose_kernels(DType::kFloat32).set->name;
  info.isa_bfloat16 = cpu::choose_kernels(DType::kBFloat16).set->name;
  for (const cpu::Candidate& candidate : cpu::kCandidates) {
    info.compiled.emplace_back(candidate.set->name);
    if (candidate.supported()) info.supported.emplace_back(candidate.set->name);
  }
  return info;
}

}  // namespace flash_dmattn
