// Fibers are left and entered by _longjmp, which the checked variant of some distributions takes for an error.
#undef _FORTIFY_SOURCE

#include "emulation.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

struct cudaStream {
  cudaGraph* captured_by = nullptr;
};
struct cudaGraph {
  std::vector<std::function<void()>> nodes;
};

namespace cuda_emulation {
namespace {

constexpr std::size_t kStackBytes = 256 << 10;
constexpr int kMostThreads = 1024;
constexpr std::size_t kMostSharedBytes = 227 << 10;  // of compute capability 9.0
constexpr int kGarbage = 0xa5;

enum class State { kReady, kAtWarp, kAtBlock, kDone };

// A place to go on from. It is entered the first time by setcontext, and by _longjmp, which calls no kernel, then.
struct Place {
  ucontext_t first;
  bool was_entered = false;
  jmp_buf jump;
  // For AddressSanitizer.
  const void* stack_bottom = nullptr;
  std::size_t stack_bytes = 0;
  void* shadow_stack = nullptr;
};

// Runs one thread of a block after the other.
struct Fiber {
  Place place;
  std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
  State state = State::kDone;
  const char* waits_in = "nothing";
  unsigned exchanges = 0;  // that the thread has begun
  // Groups of copies that are still to do, the last one not yet committed.
  std::deque<std::vector<std::function<void()>>> copies = {};
};

struct Warp {
  // A lane that goes on may begin the next exchange before others have read the last one's values.
  std::uint64_t values[2][kWarpLanes];
  const char* what[2];
  int arrived[2];
};

class Block {
 public:
  void run(unsigned threads, const std::function<void()>& thread, std::mt19937& order) {
    scheduler_.was_entered = true;
    while (fibers_.size() < threads) add_fiber();
    threads_ = threads;
    thread_ = &thread;
    at_barrier_ = 0;
    warps_.assign((threads + kWarpLanes - 1) / kWarpLanes, Warp());
    for (unsigned i = 0; i < threads; ++i) start(*fibers_[i]);
    std::vector<unsigned> warps(warps_.size()), lanes(kWarpLanes);
    std::iota(warps.begin(), warps.end(), 0u);
    std::iota(lanes.begin(), lanes.end(), 0u);
    for (bool any = true; any;) {
      any = false;
      std::shuffle(warps.begin(), warps.end(), order);
      for (const unsigned warp : warps) {
        std::shuffle(lanes.begin(), lanes.end(), order);
        while (resume_lanes(warp, lanes)) any = true;
      }
    }
    for (unsigned i = 0; i < threads; ++i) {
      if (fibers_[i]->state != State::kDone) {
        fail("block %u: thread %u waits in %s for ever", blockIdx.x, i, fibers_[i]->waits_in);
      }
      for (const auto& group : fibers_[i]->copies) {
        if (!group.empty()) fail("block %u: thread %u has not waited for all copies", blockIdx.x, i);
      }
    }
  }

  const std::uint64_t* exchange(const char* what, std::uint64_t value) {
    Warp& warp = warps_[current_ / kWarpLanes];
    Fiber& fiber = *fibers_[current_];
    const unsigned turn = fiber.exchanges++ % 2;
    if (warp.arrived[turn] == 0) {
      warp.what[turn] = what;
    } else if (std::strcmp(warp.what[turn], what) != 0) {
      fail("block %u: lanes of the warp of thread %u meet in %s and %s", blockIdx.x, current_, warp.what[turn], what);
    }
    warp.values[turn][current_ % kWarpLanes] = value;
    if (++warp.arrived[turn] == kWarpLanes) {
      warp.arrived[turn] = 0;
      const unsigned first = current_ / kWarpLanes * kWarpLanes;
      for (unsigned i = first; i < first + kWarpLanes; ++i) fibers_[i]->state = State::kReady;
    } else {
      wait(fiber, State::kAtWarp, what);
    }
    return warp.values[turn];
  }

  Fiber& running() { return *fibers_[current_]; }

  void barrier() {
    if (++at_barrier_ == threads_) {
      at_barrier_ = 0;
      for (unsigned i = 0; i < threads_; ++i) fibers_[i]->state = State::kReady;
    } else {
      wait(*fibers_[current_], State::kAtBlock, "__syncthreads");
    }
  }

 private:
  void add_fiber() {
    Fiber& fiber = *fibers_.emplace_back(std::make_unique<Fiber>());
    fiber.place.stack_bottom = fiber.stack.get();
    fiber.place.stack_bytes = kStackBytes;
    getcontext(&fiber.place.first);
    fiber.place.first.uc_stack.ss_sp = fiber.stack.get();
    fiber.place.first.uc_stack.ss_size = kStackBytes;
    fiber.place.first.uc_link = nullptr;
    makecontext(&fiber.place.first, run_threads, 0);
  }

  static void run_threads();

  static void start(Fiber& fiber) {
    fiber.state = State::kReady;
    fiber.exchanges = 0;
    fiber.copies.assign(1, {});
  }

  // Whether any lane of the warp could go on.
  bool resume_lanes(unsigned warp, const std::vector<unsigned>& lanes) {
    bool any = false;
    for (const unsigned lane : lanes) {
      const unsigned index = warp * kWarpLanes + lane;
      if (index >= threads_ || fibers_[index]->state != State::kReady) continue;
      any = true;
      current_ = index;
      threadIdx.x = index;
      change(scheduler_, fibers_[index]->place);
    }
    return any;
  }

  void wait(Fiber& fiber, State state, const char* in) {
    fiber.state = state;
    fiber.waits_in = in;
    change(fiber.place, scheduler_);
  }

  void change(Place& from, Place& to) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&from.shadow_stack, to.stack_bottom, to.stack_bytes);
#endif
    if (_setjmp(from.jump) == 0) {
      if (to.was_entered) _longjmp(to.jump, 1);
      to.was_entered = true;
      setcontext(&to.first);
    }
    arrive(from);
  }

  void arrive([[maybe_unused]] Place& place) {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    std::size_t bytes = 0;
    __sanitizer_finish_switch_fiber(place.shadow_stack, &bottom, &bytes);
    if (&place != &scheduler_) scheduler_.stack_bottom = bottom, scheduler_.stack_bytes = bytes;
#endif
  }

  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Warp> warps_;
  const std::function<void()>* thread_ = nullptr;
  unsigned threads_ = 0, current_ = 0, at_barrier_ = 0;
  Place scheduler_;
};

Block& block() {
  static Block running;
  return running;
}

void Block::run_threads() {
  Block& own = block();
  Fiber& fiber = *own.fibers_[own.current_];
  own.arrive(fiber.place);
  for (;;) {
    (*own.thread_)();
    own.wait(fiber, State::kDone, "nothing");
  }
}

std::vector<std::uint64_t>& shared_memory() {
  static std::vector<std::uint64_t> words;
  return words;
}

cudaError_t run(const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
  static std::mt19937 order;
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  std::vector<unsigned> blocks(config.gridDim.x);
  std::iota(blocks.begin(), blocks.end(), 0u);
  std::shuffle(blocks.begin(), blocks.end(), order);
  for (const unsigned index : blocks) {
    blockIdx.x = index;
    shared_memory().assign((config.dynamicSmemBytes + 7) / 8, 0x0101010101010101u * kGarbage);
    block().run(config.blockDim.x, thread, order);
  }
  return cudaSuccess;
}

// Now, or whenever the graph that captures the stream is launched.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  if (stream != nullptr && stream->captured_by != nullptr) {
    stream->captured_by->nodes.push_back(std::move(work));
  } else {
    work();
  }
  return cudaSuccess;
}

}  // namespace

const std::uint64_t* exchange(const char* what, std::uint64_t value) { return block().exchange(what, value); }

void copy_in_background(std::function<void()> copy) {
  static std::mt19937 chance;
  if (chance() % 2 == 0) return copy();
  block().running().copies.back().push_back(std::move(copy));
}

void commit_copies() { block().running().copies.emplace_back(); }

void wait_copies(int pending) {
  auto& groups = block().running().copies;
  while (groups.size() > static_cast<std::size_t>(pending) + 1) {
    for (const auto& copy : groups.front()) copy();
    groups.pop_front();
  }
}

void* dynamic_shared_memory() { return shared_memory().data(); }

void fail(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::fputs("CUDA emulation: ", stderr);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
  std::abort();
}

cudaError_t launch(const cudaLaunchConfig_t& config, std::function<void()> thread) {
  if (config.blockDim.x == 0 || config.blockDim.x > kMostThreads || config.dynamicSmemBytes > kMostSharedBytes) {
    return cudaErrorInvalidConfiguration;
  }
  return enqueue(config.stream, [config, thread = std::move(thread)] { run(config, thread); });
}

}  // namespace cuda_emulation

void __syncthreads() { cuda_emulation::block().barrier(); }

const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "emulated error"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  constexpr std::size_t kAlignment = 256;
  return posix_memalign(memory, kAlignment, bytes) == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind /*kind*/) {
  if (bytes > 0) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  return cudaMemsetAsync(memory, value, bytes, nullptr);
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream) {
  return cuda_emulation::enqueue(stream, [=] { std::memset(memory, value, bytes); });
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void* /*kernel*/, cudaFuncAttribute /*attribute*/, int /*value*/) {
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new cudaStream;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t /*stream*/) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  stream->captured_by = new cudaGraph;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = stream->captured_by;
  stream->captured_by = nullptr;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long /*flags*/) {
  *executable = new cudaGraph(*graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t /*stream*/) {
  for (const auto& node : executable->nodes) node();
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return cudaGraphDestroy(executable); }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
