// Fibers are left and entered by _longjmp, which the checked variant of some distributions takes for an error.
#undef _FORTIFY_SOURCE

#include "emulation.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <deque>
#include <iterator>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "execution.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace cuda_emulation {
namespace {

constexpr std::size_t kStackBytes = 256 << 10;
constexpr unsigned kWarpGroupThreads = 128;
constexpr int kGarbage = 0xa5;

// kWaiting: until a condition holds.
enum class State { kReady, kAtWarp, kAtBlock, kWaiting, kDone };

using Operation = std::function<void()>;
// Operations in groups, the last one not yet committed.
using Groups = std::deque<std::deque<Operation>>;

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
  unsigned exchanges = 0;                // that the thread has begun
  std::function<bool()> may_go_on = {};  // in kWaiting
  // What is still to do of the copies (cp.async), boxes to be stored (cp.async.bulk) and, for its warp, products
  // (wgmma) that the thread has begun.
  Groups copies = {}, boxes = {}, products = {};
  std::size_t product_groups = 0;  // that were committed

  std::array<Groups*, 3> begun() { return {&copies, &boxes, &products}; }
};

// Threads that have arrived, and how often there were enough of them.
struct NamedBarrier {
  unsigned arrived = 0, rounds = 0;
  bool all = true;       // of those that have arrived
  bool last_all = true;  // of the last round
};

struct Warp {
  // A lane that goes on may begin the next exchange before others have read the last one's values.
  std::uint64_t values[2][kMostExchanged][kWarpLanes];
  const char* what[2];
  int arrived[2];
};

// The oldest of those that are still to do. A group that is done leaves, but the last one.
void do_next(Groups& groups) {
  while (groups.size() > 1 && groups.front().empty()) groups.pop_front();
  if (groups.front().empty()) return;
  const Operation operation = std::move(groups.front().front());
  groups.front().pop_front();
  operation();
}

void wait_for_groups(Groups& groups, int pending) {
  while (groups.size() > static_cast<std::size_t>(pending) + 1) {
    for (const Operation& operation : groups.front()) operation();
    groups.pop_front();
  }
}

// A block's, of exactly the bytes that its launch asks for, and as aligned as the copy engine wants it.
class SharedMemory {
 public:
  explicit SharedMemory(std::size_t bytes) : bytes_(bytes), memory_(::operator new(bytes, kAlignment)) {}
  ~SharedMemory() { ::operator delete(memory_, kAlignment); }
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* get() const { return memory_; }
  std::size_t bytes() const { return bytes_; }
  void fill_with_garbage() const { std::memset(memory_, kGarbage, bytes_); }

 private:
  static constexpr std::align_val_t kAlignment{1024};
  std::size_t bytes_;
  void* memory_;
};

class Block {
 public:
  // `index`: of the grid; `rank`: of the cluster.
  void begin(unsigned index, int rank, const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
    const unsigned threads = config.blockDim.x;
    index_ = index, rank_ = rank;
    shared_memory_ = std::make_unique<SharedMemory>(config.dynamicSmemBytes);
    shared_memory_->fill_with_garbage();
    scheduler_.was_entered = true;
    while (fibers_.size() < threads) add_fiber();
    threads_ = threads;
    thread_ = &thread;
    at_barrier_ = 0;
    warps_.assign((threads + kWarpLanes - 1) / kWarpLanes, Warp());
    named_barriers_.assign(kNamedBarriers, NamedBarrier());
    engine_.clear();
    for (unsigned i = 0; i < threads; ++i) start(*fibers_[i]);
    warp_order_.resize(warps_.size());
    lane_order_.resize(kWarpLanes);
    std::iota(warp_order_.begin(), warp_order_.end(), 0u);
    std::iota(lane_order_.begin(), lane_order_.end(), 0u);
  }

  // Every thread goes on until it has to wait. Says whether another round may bring more, even if other blocks do
  // nothing.
  bool go_on(std::mt19937& order) {
    blockIdx.x = index_;
    advanced_ = false;
    std::shuffle(warp_order_.begin(), warp_order_.end(), order);
    for (const unsigned warp : warp_order_) {
      std::shuffle(lane_order_.begin(), lane_order_.end(), order);
      while (resume_lanes(warp)) continue;
    }
    // What is under way advances by chance; if nothing else does, something of it has to.
    return advance_operations(!advanced_, order) || advanced_;
  }

  void end() const {
    for (unsigned i = 0; i < threads_; ++i) {
      Fiber& fiber = *fibers_[i];
      if (fiber.state != State::kDone) {
        fail("block %u: thread %u waits in %s for ever", index_, i, fiber.waits_in);
      }
      for (const Groups* groups : fiber.begun()) {
        for (const auto& group : *groups) {
          if (!group.empty()) fail("block %u: thread %u has not waited for what it began", index_, i);
        }
      }
    }
    for (unsigned id = 0; id < kNamedBarriers; ++id) {
      if (named_barriers_[id].arrived != 0) fail("block %u: barrier %u is left with threads", index_, id);
    }
  }

  int rank() const { return rank_; }
  const SharedMemory& shared_memory() const { return *shared_memory_; }

  const std::uint64_t (*exchange(const char* what, const std::uint64_t* own, int count))[kWarpLanes] {
    Warp& warp = warps_[current_ / kWarpLanes];
    Fiber& fiber = *fibers_[current_];
    const unsigned turn = fiber.exchanges++ % 2;
    if (warp.arrived[turn] == 0) {
      warp.what[turn] = what;
    } else if (std::strcmp(warp.what[turn], what) != 0) {
      fail("block %u: lanes of the warp of thread %u meet in %s and %s", blockIdx.x, current_, warp.what[turn], what);
    }
    for (int i = 0; i < count; ++i) warp.values[turn][i][current_ % kWarpLanes] = own[i];
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
  Fiber& first_of_warp() { return *fibers_[current_ / kWarpLanes * kWarpLanes]; }
  std::vector<Operation>& engine() { return engine_; }
  NamedBarrier& named_barrier(int id) { return named_barriers_[static_cast<std::size_t>(id)]; }

  void wait_until(const char* what, std::function<bool()> may_go_on) {
    Fiber& fiber = *fibers_[current_];
    if (may_go_on()) return;
    fiber.may_go_on = std::move(may_go_on);
    wait(fiber, State::kWaiting, what);
  }

  // Says whether `value` held in all threads, if the thread waits for the others.
  bool arrive_at(NamedBarrier& barrier, unsigned threads, const char* what, bool value, bool waits) {
    barrier.all &= value;
    const unsigned round = barrier.rounds;
    if (++barrier.arrived == threads) {
      barrier.last_all = barrier.all;
      barrier.arrived = 0, barrier.all = true;
      ++barrier.rounds;
    } else if (waits) {
      wait_until(what, [&barrier, round] { return barrier.rounds != round; });
    }
    return barrier.last_all;
  }

  void commit_products() {
    Fiber& fiber = first_of_warp();
    fiber.products.emplace_back();
    ++fiber.product_groups;
  }

  // A product is one of all warps of the group: none of them has done it before the others have.
  void wait_products(int pending) {
    const std::size_t committed = first_of_warp().product_groups, left = static_cast<std::size_t>(pending);
    if (committed <= left) return;
    const std::size_t wanted = committed - left;
    const unsigned first = current_ / kWarpGroupThreads * kWarpGroupThreads;
    for (unsigned i = first; i < first + kWarpGroupThreads; i += kWarpLanes) {
      Fiber& fiber = *fibers_[i];
      wait_until("wgmma_wait", [&fiber, wanted] { return fiber.product_groups >= wanted; });
      wait_for_groups(fiber.products, static_cast<int>(fiber.product_groups - wanted));
    }
  }

  // Until the others have had a chance to run.
  void give_way() {
    const unsigned round = round_;
    wait_until(kLoop, [this, round] { return round_ != round; });
  }

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
    fiber.product_groups = 0;
    for (Groups* groups : fiber.begun()) groups->assign(1, {});
  }

  // `one_at_least`: if there is any. Says whether something may still happen: an operation, or a loop's next round.
  bool advance_operations(bool one_at_least, std::mt19937& order) {
    ++round_;
    std::vector<std::pair<unsigned, Groups*>> begun;
    for (unsigned i = 0; i < threads_; ++i) {
      for (Groups* groups : fibers_[i]->begun()) {
        if (groups->size() > 1 || !groups->front().empty()) begun.emplace_back(i, groups);
      }
    }
    const std::size_t count = begun.size() + engine_.size();
    if (count == 0) {
      rounds_in_vain_ = one_at_least ? rounds_in_vain_ + 1 : 0;
      return waits_in_loop() && rounds_in_vain_ < kMostRoundsInVain;
    }
    rounds_in_vain_ = 0;
    if (!one_at_least && order() % 2 == 0) return true;
    const std::size_t chosen = order() % count;
    if (chosen < begun.size()) {
      do_next(*begun[chosen].second);
    } else {
      const auto at = engine_.begin() + static_cast<std::ptrdiff_t>(chosen - begun.size());
      const Operation operation = std::move(*at);
      engine_.erase(at);
      operation();
    }
    return true;
  }

  bool waits_in_loop() const {
    return std::any_of(fibers_.begin(), fibers_.begin() + threads_, [](const auto& fiber) {
      return fiber->state == State::kWaiting && std::strcmp(fiber->waits_in, kLoop) == 0;
    });
  }

  // Whether any lane of the warp could go on.
  bool resume_lanes(unsigned warp) {
    bool any = false;
    for (const unsigned lane : lane_order_) {
      const unsigned index = warp * kWarpLanes + lane;
      if (index >= threads_) continue;
      Fiber& fiber = *fibers_[index];
      if (fiber.state == State::kWaiting && fiber.may_go_on()) fiber.state = State::kReady;
      if (fiber.state != State::kReady) continue;
      any = true;
      advanced_ |= std::strcmp(fiber.waits_in, kLoop) != 0;
      fiber.waits_in = "nothing";
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

  static constexpr unsigned kNamedBarriers = 16, kMostRoundsInVain = 100000;
  static constexpr const char* kLoop = "a loop";

  unsigned index_ = 0;
  int rank_ = 0;
  std::unique_ptr<SharedMemory> shared_memory_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<unsigned> warp_order_, lane_order_;
  std::vector<Warp> warps_;
  std::vector<NamedBarrier> named_barriers_;
  std::vector<Operation> engine_;  // copies in bulk that are under way
  unsigned round_ = 0, rounds_in_vain_ = 0;
  bool advanced_ = false;  // in this round, not counting loops that have gone on
  const std::function<void()>* thread_ = nullptr;
  unsigned threads_ = 0, current_ = 0, at_barrier_ = 0;
  Place scheduler_;
};

// The blocks that run at the same time: one, or a cluster.
class Cluster {
 public:
  void run(unsigned first_block, unsigned blocks, const cudaLaunchConfig_t& config, const std::function<void()>& thread,
           std::mt19937& order) {
    while (blocks_.size() < blocks) blocks_.push_back(std::make_unique<Block>());
    size_ = blocks;
    barrier_ = {};
    threads_ = blocks * config.blockDim.x;
    for (unsigned i = 0; i < blocks; ++i) blocks_[i]->begin(first_block + i, static_cast<int>(i), config, thread);
    for (bool goes_on = true; goes_on;) {
      goes_on = false;
      for (unsigned i = 0; i < blocks; ++i) {
        running_ = blocks_[i].get();
        goes_on |= running_->go_on(order);
      }
    }
    for (unsigned i = 0; i < blocks; ++i) blocks_[i]->end();
  }

  Block& running() { return *running_; }
  Block& block(int rank) {
    if (rank < 0 || static_cast<unsigned>(rank) >= size_) fail("a cluster of %u has no block %d", size_, rank);
    return *blocks_[static_cast<std::size_t>(rank)];
  }

  void barrier() { running_->arrive_at(barrier_, threads_, "sync_cluster", true, true); }

 private:
  std::vector<std::unique_ptr<Block>> blocks_;
  Block* running_ = nullptr;
  unsigned size_ = 0, threads_ = 0;
  NamedBarrier barrier_;
};

Cluster& cluster() {
  static Cluster running;
  return running;
}
Block& block() { return cluster().running(); }

void Block::run_threads() {
  Block& own = block();
  Fiber& fiber = *own.fibers_[own.current_];
  own.arrive(fiber.place);
  for (;;) {
    (*own.thread_)();
    own.wait(fiber, State::kDone, "nothing");
  }
}

}  // namespace

const std::uint64_t* exchange(const char* what, std::uint64_t value) { return block().exchange(what, &value, 1)[0]; }
const std::uint64_t (*exchange(const char* what, const std::uint64_t* values, int count))[kWarpLanes] {
  return block().exchange(what, values, count);
}

void copy_in_background(std::function<void()> copy) {
  static std::mt19937 chance;
  if (chance() % 2 == 0) return copy();
  block().running().copies.back().push_back(std::move(copy));
}

void commit_copies() { block().running().copies.emplace_back(); }
void wait_copies(int pending) { wait_for_groups(block().running().copies, pending); }

void after_copies(std::function<void()> then) {
  Groups& copies = block().running().copies;
  std::vector<std::function<void()>> own;
  for (auto& group : copies) {
    std::move(group.begin(), group.end(), std::back_inserter(own));
    group.clear();
  }
  copy_in_bulk([own = std::move(own), then = std::move(then)] {
    for (const auto& copy : own) copy();
    then();
  });
}

void copy_in_bulk(std::function<void()> copy) { block().engine().push_back(std::move(copy)); }

void store_in_bulk(std::function<void()> store) { block().running().boxes.back().push_back(std::move(store)); }
void commit_stores() { block().running().boxes.emplace_back(); }
void wait_stores(int pending) { wait_for_groups(block().running().boxes, pending); }

void begin_product(std::function<void()> product) {
  block().first_of_warp().products.back().push_back(std::move(product));
}
void commit_products() { block().commit_products(); }
void wait_products(int pending) { block().wait_products(pending); }

void wait_until(const char* what, std::function<bool()> may_go_on) { block().wait_until(what, std::move(may_go_on)); }
void give_way() { block().give_way(); }

bool arrive_at_named_barrier(int id, int threads, bool value, bool waits) {
  Block& own = block();
  return own.arrive_at(own.named_barrier(id), static_cast<unsigned>(threads), "a named barrier", value, waits);
}

void* dynamic_shared_memory() { return block().shared_memory().get(); }
std::size_t dynamic_shared_bytes() { return block().shared_memory().bytes(); }
void* dynamic_shared_memory_of(int rank) { return cluster().block(rank).shared_memory().get(); }
int block_rank() { return block().rank(); }
void sync_cluster() { cluster().barrier(); }

void fail(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::fputs("CUDA emulation: ", stderr);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
  std::abort();
}

void run(const cudaLaunchConfig_t& config, unsigned blocks, const std::function<void()>& thread) {
  static std::mt19937 order;
  gridDim = config.gridDim;
  blockDim = config.blockDim;
  std::vector<unsigned> clusters(config.gridDim.x / blocks);
  std::iota(clusters.begin(), clusters.end(), 0u);
  std::shuffle(clusters.begin(), clusters.end(), order);
  for (const unsigned index : clusters) cluster().run(index * blocks, blocks, config, thread, order);
}

}  // namespace cuda_emulation

void __syncthreads() { cuda_emulation::block().barrier(); }
