#include "flash_dmattn/executor.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <set>
#include <thread>
#include <vector>

#include "core/thread_pool.h"

namespace flash_dmattn {
namespace {

using internal::ThreadPool;

TEST(ThreadPool, RunsEveryWorkerOnce) {
  for (const int concurrency : {1, 2, 5}) {
    ThreadPool pool(concurrency);
    EXPECT_EQ(pool.concurrency(), concurrency);
    for (const int workers : {0, 1, 2, 3, 5, 64}) {
      std::vector<std::atomic<int>> calls(static_cast<std::size_t>(workers));
      pool.run(workers, [&](int worker) { ++calls.at(static_cast<std::size_t>(worker)); });
      for (int worker = 0; worker < workers; ++worker) {
        EXPECT_EQ(calls[static_cast<std::size_t>(worker)], 1)
            << "worker " << worker << " of " << workers << ", concurrency " << concurrency;
      }
    }
  }
}

TEST(ThreadPool, ReturnsOnlyWhenAllAreDone) {
  ThreadPool pool(4);
  for (int round = 0; round < 200; ++round) {
    int sums[7] = {};  // plain ints: a return that came too early would read them while they are written
    pool.run(7, [&](int worker) {
      if (worker == round % 7) std::this_thread::sleep_for(std::chrono::microseconds(50));
      sums[worker] = worker + round;
    });
    for (int worker = 0; worker < 7; ++worker) ASSERT_EQ(sums[worker], worker + round);
  }
}

TEST(ThreadPool, WorkersOverlapUpToTheConcurrency) {
  constexpr int kConcurrency = 3;
  ThreadPool pool(kConcurrency);
  for (int round = 0; round < 3; ++round) {  // the first round starts the threads, later ones wake them
    // Each worker waits for the others, which only works here because the pool has a thread for each.
    std::latch all_running(kConcurrency);
    std::vector<std::thread::id> threads(kConcurrency);
    pool.run(kConcurrency, [&](int worker) {
      threads[static_cast<std::size_t>(worker)] = std::this_thread::get_id();
      all_running.arrive_and_wait();
    });
    EXPECT_EQ(threads[0], std::this_thread::get_id()) << "worker 0 belongs to the calling thread";
    EXPECT_EQ(std::set(threads.begin(), threads.end()).size(), std::size_t{kConcurrency});
  }
}

TEST(ThreadPool, NestedRunsAreSequentialOnTheirThread) {
  ThreadPool pool(3);
  ThreadPool other(3);
  std::atomic<int> inner_calls = 0;
  pool.run(2, [&](int) {
    const std::thread::id outer_thread = std::this_thread::get_id();
    for (ThreadPool* nested : {&pool, &other}) {
      int expected_worker = 0;
      nested->run(4, [&](int worker) {
        EXPECT_EQ(worker, expected_worker++);
        EXPECT_EQ(std::this_thread::get_id(), outer_thread);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));  // time for an idle thread to interfere
        ++inner_calls;
      });
    }
  });
  EXPECT_EQ(inner_calls, 2 * 2 * 4);
}

TEST(ThreadPool, ServesCallersAtTheSameTime) {
  ThreadPool pool(3);
  std::atomic<int> total = 0;
  {
    std::vector<std::jthread> callers;
    for (int caller = 0; caller < 4; ++caller) {
      callers.emplace_back([&] {
        for (int round = 0; round < 100; ++round) {
          std::atomic<int> mine = 0;
          pool.run(5, [&](int) { ++mine; });
          EXPECT_EQ(mine, 5);
          total += mine;
        }
      });
    }
  }
  EXPECT_EQ(total, 4 * 100 * 5);
}

TEST(ThreadPool, StopsWithAndWithoutHavingRun) {
  { ThreadPool pool(3); }
  ThreadPool pool(3);
  std::atomic<int> calls = 0;
  pool.run(3, [&](int) { ++calls; });
  EXPECT_EQ(calls, 3);
}

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) { return static_cast<double>(time.tv_sec) + 1e-6 * time.tv_usec; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

TEST(ThreadPool, SleepsBetweenCalls) {
  ThreadPool pool(4);
  pool.run(4, [](int) {});
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  EXPECT_LT(cpu_seconds() - before, 0.1) << "threads burn processor time while there is nothing to do";
}

TEST(Concurrency, FollowsTheAffinityMask) {
  const int before = internal::usable_cores();
  EXPECT_GE(before, 1);
  cpu_set_t saved;
  ASSERT_EQ(sched_getaffinity(0, sizeof saved, &saved), 0);
  int first = 0;
  while (!CPU_ISSET(first, &saved)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(internal::usable_cores(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof saved, &saved), 0);
  EXPECT_EQ(internal::usable_cores(), before);
}

TEST(Concurrency, SettingIsAPositiveNumberOrReported) {
  const int cores = internal::usable_cores();
  EXPECT_EQ(internal::default_concurrency(nullptr), cores);
  EXPECT_EQ(internal::default_concurrency(""), cores);
  EXPECT_EQ(internal::default_concurrency("7"), 7);
  for (const char* setting : {"0", "-2", "two", "3x", " 3", "99999999999"}) {
    testing::internal::CaptureStderr();
    EXPECT_EQ(internal::default_concurrency(setting), cores) << setting;
    const std::string message = testing::internal::GetCapturedStderr();
    EXPECT_NE(message.find(setting), std::string::npos) << message;
    EXPECT_NE(message.find("FLASH_DMATTN_NUM_THREADS"), std::string::npos) << message;
  }
}

class DefaultExecutor : public testing::Test {
 public:
  static constexpr int kConcurrency = 3;

 protected:
  // Before the first use, whichever test that is in.
  static void SetUpTestSuite() { ASSERT_EQ(setenv("FLASH_DMATTN_NUM_THREADS", "3", 1), 0); }
};

TEST_F(DefaultExecutor, IsOneOfTheConfiguredSize) {
  EXPECT_EQ(&default_executor(), &default_executor());
  EXPECT_EQ(default_executor().concurrency(), kConcurrency);
}

// ThreadSanitizer ends a process that forks with threads running.
#if !defined(__SANITIZE_THREAD__)
void run_together() {
  std::latch all_running(DefaultExecutor::kConcurrency);
  default_executor().run(DefaultExecutor::kConcurrency, [&](int) { all_running.arrive_and_wait(); });
}

void expect_child_runs_together() {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // a child that waits for threads that it does not have ends here
    run_together();
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "ended by signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(DefaultExecutor, WorksInAForkedChild) {
  run_together();
  expect_child_runs_together();
}

// The child's copy of the pool is in whatever state the calls left it in, perhaps locked. The callers have
// warmed up by the first fork and allocate nothing more: a sanitizer's allocator (GCC 12's) that is locked
// while the process forks stays locked in the child.
TEST_F(DefaultExecutor, WorksInAChildForkedWhileCallsRun) {
  constexpr int kCallers = 2;
  run_together();
  std::latch all_calling(kCallers + 1);
  std::atomic<bool> stop = false;
  std::vector<std::jthread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&] {
      default_executor().run(kConcurrency, [](int) {});
      all_calling.count_down();
      while (!stop) default_executor().run(kConcurrency, [](int) {});
    });
  }
  all_calling.arrive_and_wait();
  for (int round = 0; round < 20 && !HasFatalFailure(); ++round) expect_child_runs_together();
  stop = true;
}
#endif

}  // namespace
}  // namespace flash_dmattn
