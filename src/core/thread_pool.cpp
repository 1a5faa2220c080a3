#include "core/thread_pool.h"

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <system_error>

#include "flash_dmattn/executor.h"

namespace flash_dmattn {
namespace internal {
namespace {

// True on a thread that is inside a task of any pool.
thread_local bool inside_task = false;

class TaskScope {
 public:
  TaskScope() { inside_task = true; }
  ~TaskScope() { inside_task = false; }
};

}  // namespace

ThreadPool::ThreadPool(int concurrency) : concurrency_(std::max(concurrency, 1)) {}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_ready_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(int workers, const std::function<void(int)>& task) {
  if (workers <= 1 || concurrency_ == 1 || inside_task) {
    for (int worker = 0; worker < workers; ++worker) task(worker);
    return;
  }
  Call call{.task = task, .workers = workers, .next = 1, .unfinished = workers, .finished = {}};
  int helpers;
  {
    const std::lock_guard lock(mutex_);
    start_threads();
    open_.push_back(&call);
    helpers = std::min(workers - 1, static_cast<int>(threads_.size()));
  }
  for (int helper = 0; helper < helpers; ++helper) work_ready_.notify_one();
  {
    const TaskScope scope;
    task(0);
  }
  std::unique_lock lock(mutex_);
  --call.unfinished;
  while (call.next < call.workers) take_worker(call, lock);
  call.finished.wait(lock, [&call] { return call.unfinished == 0; });
}

// Takes the next worker of `call` and runs it with the lock released.
void ThreadPool::take_worker(Call& call, std::unique_lock<std::mutex>& lock) {
  const int worker = call.next++;
  if (call.next == call.workers) open_.erase(std::find(open_.begin(), open_.end(), &call));
  lock.unlock();
  {
    const TaskScope scope;
    call.task(worker);
  }
  lock.lock();
  // Notified under the lock: the caller, who owns `call`, cannot return before the lock is free again.
  if (--call.unfinished == 0) call.finished.notify_one();
}

void ThreadPool::start_threads() {
  if (started_) return;
  started_ = true;
  // A call then allocates nothing unless more are open at once than there are threads.
  open_.reserve(concurrency_);
  try {
    while (static_cast<int>(threads_.size()) < concurrency_ - 1) threads_.emplace_back([this] { serve(); });
  } catch (const std::system_error& error) {
    // The system gives no more threads. Fewer do the same work, since callers take what nobody else takes.
    std::fprintf(stderr, "flash_dmattn: started %zu of %d threads: %s\n", threads_.size(), concurrency_ - 1,
                 error.what());
  }
}

void ThreadPool::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_ready_.wait(lock, [this] { return stopping_ || !open_.empty(); });
    if (stopping_) return;
    take_worker(*open_.front(), lock);
  }
}

int usable_cores() {
#if defined(__linux__)
  // The kernel refuses a mask shorter than its own (EINVAL), so grow until it fits.
  for (int bits = CPU_SETSIZE; bits <= (1 << 20); bits *= 2) {
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> mask(CPU_ALLOC(bits), [](cpu_set_t* set) { CPU_FREE(set); });
    if (mask == nullptr) break;
    const std::size_t size = CPU_ALLOC_SIZE(bits);
    if (sched_getaffinity(0, size, mask.get()) == 0) return std::max(CPU_COUNT_S(size, mask.get()), 1);
    if (errno != EINVAL) break;
  }
#endif
  return std::max(static_cast<int>(std::thread::hardware_concurrency()), 1);
}

int default_concurrency(const char* setting) {
  const int cores = usable_cores();
  if (setting == nullptr || *setting == '\0') return cores;
  int threads = 0;
  const char* end = setting + std::strlen(setting);
  const std::from_chars_result parsed = std::from_chars(setting, end, threads);
  if (parsed.ec == std::errc() && parsed.ptr == end && threads > 0) return threads;
  std::fprintf(stderr, "flash_dmattn: FLASH_DMATTN_NUM_THREADS must be a positive integer; got \"%s\", using %d\n",
               setting, cores);
  return cores;
}

namespace {

std::atomic<ThreadPool*> default_pool{nullptr};

// A forked child inherits the pool but none of its threads, and perhaps a lock that nobody will release:
// it leaves the pool alone and makes a new one when it first asks.
[[maybe_unused]] const int fork_handler =
    pthread_atfork(nullptr, nullptr, [] { default_pool.store(nullptr, std::memory_order_relaxed); });

}  // namespace
}  // namespace internal

Executor& default_executor() {
  using internal::default_pool;
  using internal::ThreadPool;
  ThreadPool* pool = default_pool.load(std::memory_order_acquire);
  if (pool == nullptr) {
    auto created = std::make_unique<ThreadPool>(internal::default_concurrency(std::getenv("FLASH_DMATTN_NUM_THREADS")));
    // Never destroyed: a static destructor would pull the threads away under calls that outlive main().
    if (default_pool.compare_exchange_strong(pool, created.get(), std::memory_order_acq_rel)) pool = created.release();
  }
  return *pool;
}

}  // namespace flash_dmattn
