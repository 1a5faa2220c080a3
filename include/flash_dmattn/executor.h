// Where work runs. On the CPU, hosts with a thread pool of their own (torch, OpenMP,
// TBB) pass an Executor that uses it, so that there is never a second pool beside theirs.
#pragma once

#include <functional>

#include "flash_dmattn/export.h"

namespace FLASH_DMATTN_API flash_dmattn {

// Runs tasks on threads of the caller's.
class Executor {
 public:
  virtual ~Executor() = default;

  // How many workers may run at the same time, at least 1.
  virtual int concurrency() const = 0;

  // Calls task(worker) once for every worker in [0, workers), on any threads, at the same time or one after another,
  // and returns when all these calls have returned. They never wait for each other and never throw.
  virtual void run(int workers, const std::function<void(int worker)>& task) = 0;
};

// The library's own pool, used when a call names no executor. Its threads sleep between calls.
// Created at the first use, with as many workers as the environment variable FLASH_DMATTN_NUM_THREADS says, else one
// for each core that the process may run on.
Executor& default_executor();

// Where a call's tensors and workspace are and its work runs.
struct Device {
  enum class Kind { kCpu, kCuda };

  Kind kind = Kind::kCpu;
  void* stream = nullptr;  // cudaStream_t of the current CUDA device: work is enqueued, calls return before it is done

  static Device cuda(void* stream) { return {Kind::kCuda, stream}; }
  bool is_cuda() const { return kind == Kind::kCuda; }
};

}  // namespace FLASH_DMATTN_API flash_dmattn
