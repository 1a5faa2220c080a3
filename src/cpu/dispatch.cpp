#include "cpu/dispatch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cpu/backend.h"
#include "cpu/config.h"
#include "flash_dmattn/info.h"
#include "plan/arena.h"

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

bool logging() {
  static const bool enabled = [] {
    const char* value = std::getenv("FLASH_DMATTN_LOG");
    return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
  }();
  return enabled;
}

void log_call(const char* direction, const AttentionProblem& problem, const KernelSet& set, int chunk_rows,
              int pass_heads, std::int64_t units, int workers) {
  std::fprintf(stderr,
               "flash_dmattn: cpu/%s %s %s B%lld H%lld Hkv%lld Sq%lld Sk%lld D%lld%s%s%s%s: chunks of %d rows x %d "
               "heads, %lld units, %d workers\n",
               set.name, name_of(problem.dtype), direction, static_cast<long long>(problem.batch),
               static_cast<long long>(problem.heads), static_cast<long long>(problem.key_heads),
               static_cast<long long>(problem.rows), static_cast<long long>(problem.keys),
               static_cast<long long>(problem.head_dim), problem.is_causal ? " causal" : "",
               problem.mask.defined() ? " mask" : "", problem.interval_begin.defined() ? " intervals" : "",
               problem.bias.defined() ? " bias" : "", chunk_rows, pass_heads, static_cast<long long>(units), workers);
}

std::size_t aligned(std::size_t bytes) {
  return (bytes + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
}

// Multiplications below which waking another worker costs more than it saves: some 30 us of one core.
constexpr double kWorkPerWorker = 4e6;

// Upper bound of the multiplications of one of the call's products, masks aside.
double work_of(const AttentionProblem& problem) {
  return static_cast<double>(problem.batch * problem.heads) * static_cast<double>(problem.rows) *
         static_cast<double>(problem.keys) * static_cast<double>(problem.head_dim);
}

int worker_count(const AttentionProblem& problem, std::int64_t units, const Executor& executor) {
  const auto worth = static_cast<std::int64_t>(std::min(work_of(problem) / kWorkPerWorker, 1e6)) + 1;
  const std::int64_t concurrency = std::max(executor.concurrency(), 1);
  return static_cast<int>(std::min({units, concurrency, worth}));
}

// Workers take units in order, so that the longest, which come first, start first.
template <typename RunUnit>
void run_units(std::int64_t units, int workers, Executor& executor, const Kernels& kernels, RunUnit run_unit) {
  std::atomic<std::int64_t> next{0};
  const auto work = [&](int worker) {
    if (kernels.enter != nullptr) kernels.enter();
    for (std::int64_t unit = next.fetch_add(1); unit < units; unit = next.fetch_add(1)) run_unit(unit, worker);
    if (kernels.leave != nullptr) kernels.leave();
  };
  if (workers == 1) {
    work(0);
  } else {
    executor.run(workers, work);
  }
}

IntervalIndices build_indices(const AttentionProblem& problem, void* memory, Executor& executor,
                              const Kernels& kernels) {
  const IntervalIndices indices(problem, memory);
  if (indices.size() > 0) {
    run_units(indices.size(), worker_count(problem, indices.size(), executor), executor, kernels,
              [&](std::int64_t position, int) { indices.build(position); });
  }
  return indices;
}

// Each worker counts for itself.
class WorkerCounters {
 public:
  WorkerCounters(AttentionCounters* total, int workers) : total_(total) {
    if (total != nullptr) counters_.resize(static_cast<std::size_t>(workers));
  }
  AttentionCounters* of(int worker) {
    return total_ == nullptr ? nullptr : &counters_[static_cast<std::size_t>(worker)];
  }

  // Tiles that the dense problem has and no worker visited were skipped.
  void add_up(const AttentionProblem& problem, int row_tile) {
    if (total_ == nullptr) return;
    AttentionCounters sum;
    for (const AttentionCounters& one : counters_) {
      sum.tiles_visited += one.tiles_visited;
      sum.tiles_partial += one.tiles_partial;
      sum.scores_kept += one.scores_kept;
      sum.scores_computed += one.scores_computed;
      sum.keys_packed += one.keys_packed;
    }
    const std::int64_t dense_tiles =
        problem.batch * problem.heads * ((problem.rows + row_tile - 1) / row_tile) * words_for(problem.keys);
    total_->tiles_visited += sum.tiles_visited;
    total_->tiles_partial += sum.tiles_partial;
    total_->tiles_skipped += dense_tiles - sum.tiles_visited;
    total_->scores_kept += sum.scores_kept;
    total_->scores_computed += sum.scores_computed;
    total_->keys_packed += sum.keys_packed;
  }

 private:
  AttentionCounters* total_;
  std::vector<AttentionCounters> counters_;
};

}  // namespace

ChosenKernels choose_kernels(DType dtype) {
  static const std::array<ChosenKernels, 3> chosen = {find_kernels(DType::kFloat32), find_kernels(DType::kFloat16),
                                                      find_kernels(DType::kBFloat16)};
  return chosen[dtype == DType::kFloat32 ? 0 : dtype == DType::kFloat16 ? 1 : 2];
}

std::size_t forward_workspace(const AttentionProblem& problem, const Executor& executor) {
  const ForwardSchedule schedule = make_forward_schedule(problem, executor.concurrency());
  const Kernels& kernels = *choose_kernels(problem.dtype).kernels;
  return aligned(IntervalIndices::bytes(problem)) +
         static_cast<std::size_t>(worker_count(problem, schedule.units, executor)) *
             aligned(kernels.forward_scratch(problem, schedule));
}

void forward(const ForwardProblem& problem, void* workspace, Executor& executor, AttentionCounters* counters) {
  const ForwardSchedule schedule = make_forward_schedule(problem, executor.concurrency());
  const ChosenKernels chosen = choose_kernels(problem.dtype);
  const Kernels& kernels = *chosen.kernels;
  const int workers = worker_count(problem, schedule.units, executor);
  const std::size_t scratch = aligned(kernels.forward_scratch(problem, schedule));
  if (logging()) {
    log_call("forward", problem, *chosen.set, schedule.chunk_rows, schedule.pass_heads, schedule.units, workers);
  }
  const IntervalIndices indices = build_indices(problem, workspace, executor, kernels);
  std::byte* scratches = static_cast<std::byte*>(workspace) + aligned(IntervalIndices::bytes(problem));
  WorkerCounters counted(counters, workers);
  run_units(schedule.units, workers, executor, kernels, [&](std::int64_t unit, int worker) {
    kernels.forward_unit(problem, schedule, indices, unit, scratches + static_cast<std::size_t>(worker) * scratch,
                         counted.of(worker));
  });
  counted.add_up(problem, kForwardRowTile);
}

std::size_t backward_workspace(const BackwardProblem& problem, const Executor& executor) {
  const BackwardSchedule schedule = make_backward_schedule(problem, executor.concurrency());
  const Kernels& kernels = *choose_kernels(problem.dtype).kernels;
  return aligned(IntervalIndices::bytes(problem)) + aligned(kernels.backward_sums(problem, schedule)) +
         static_cast<std::size_t>(worker_count(problem, schedule.units, executor)) *
             aligned(kernels.backward_scratch(problem, schedule));
}

void backward(const BackwardProblem& problem, void* workspace, Executor& executor, AttentionCounters* counters) {
  const BackwardSchedule schedule = make_backward_schedule(problem, executor.concurrency());
  const ChosenKernels chosen = choose_kernels(problem.dtype);
  const Kernels& kernels = *chosen.kernels;
  const int workers = worker_count(problem, schedule.units, executor);
  const std::size_t scratch = aligned(kernels.backward_scratch(problem, schedule));
  const IntervalIndices indices = build_indices(problem, workspace, executor, kernels);
  std::byte* sums = static_cast<std::byte*>(workspace) + aligned(IntervalIndices::bytes(problem));
  std::byte* scratches = sums + aligned(kernels.backward_sums(problem, schedule));
  if (logging()) {
    log_call("backward", problem, *chosen.set, schedule.chunk_rows, schedule.pass_heads, schedule.units, workers);
  }
  WorkerCounters counted(counters, workers);
  run_units(schedule.units, workers, executor, kernels, [&](std::int64_t unit, int worker) {
    kernels.backward_unit(problem, schedule, indices, unit, sums,
                          scratches + static_cast<std::size_t>(worker) * scratch, counted.of(worker));
  });
  const std::int64_t parts = kernels.finish_parts(problem, schedule);
  if (parts > 0) {
    run_units(parts, worker_count(problem, parts, executor), executor, kernels,
              [&](std::int64_t part, int) { kernels.finish_part(problem, schedule, part, sums); });
  }
  counted.add_up(problem, kBackwardRowTile);
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
