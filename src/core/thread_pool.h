// The thread pool behind default_executor().
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "flash_dmattn/executor.h"

namespace flash_dmattn::internal {

// Threads that sleep on a condition variable between calls. The calling thread takes worker 0 and then
// whatever is left, so a call never waits for a thread to wake up while it could work itself.
//
// Any number of threads may call run() at once: their calls share the pool. A run() from inside a task
// runs its workers one after another on the thread it is on.
class ThreadPool final : public Executor {
 public:
  // `concurrency` counts the calling thread. Threads start with the first call that needs them.
  explicit ThreadPool(int concurrency);
  ~ThreadPool() override;  // no call may be running

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int concurrency() const override { return concurrency_; }
  void run(int workers, const std::function<void(int worker)>& task) override;

 private:
  // One run() in progress; lives on its caller's stack.
  struct Call {
    const std::function<void(int)>& task;
    const int workers;
    int next;        // first worker that nobody has taken
    int unfinished;  // workers that have not returned
    std::condition_variable finished;
  };

  void start_threads();
  void serve();
  void take_worker(Call& call, std::unique_lock<std::mutex>& lock);

  const int concurrency_;
  std::mutex mutex_;  // guards everything below, and every Call
  std::condition_variable work_ready_;
  std::vector<Call*> open_;  // calls with workers that nobody has taken, oldest first
  std::vector<std::thread> threads_;
  bool started_ = false;
  bool stopping_ = false;
};

// Cores that this process may run on (its affinity mask), at least 1.
int usable_cores();

// Workers of the default executor: `setting` (FLASH_DMATTN_NUM_THREADS, may be null) if it is a positive
// number, else usable_cores(), with a line on stderr if the setting was something else.
int default_concurrency(const char* setting);

}  // namespace flash_dmattn::internal
