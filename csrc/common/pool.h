// SPDX-License-Identifier: Apache-2.0
// Thread pool behind parallel.h. The calling thread publishes a job. The caller and all workers
// that arrive in time claim the job chunk by chunk (claims.h), and the job ends when every claimed
// chunk is finished. No thread waits for a worker that has not begun, no lock is contended by more
// than two threads, and idle threads spin briefly and then sleep.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/claims.h"

namespace specops {

// Lets one thread wait until another thread makes a condition true.
class Sleeper {
 public:
  // Returns when ready() is true: spins briefly, then sleeps. The thread that makes ready() true
  // must call wake() afterwards. Both accesses are sequentially consistent with `sleeps_`: either
  // wake() sees that the waiting thread sleeps, or that thread sees that ready() is true. `yields`:
  // give up the CPU while spinning, because the other threads may need this CPU. Workers must not
  // yield: on a shared CPU they would stay queued behind their caller.
  template <typename Ready>
  void wait(const Ready& ready, bool yields) {
    if (spin(ready, yields)) return;
    std::unique_lock<std::mutex> lock(lock_);
    sleeps_.store(true, std::memory_order_seq_cst);
    wake_.wait(lock, ready);
    sleeps_.store(false, std::memory_order_relaxed);
  }

  void wake() {
    if (!sleeps_.load(std::memory_order_seq_cst)) return;
    {
      std::lock_guard<std::mutex> guard(lock_);
    }  // the sleeper has checked ready() and is now asleep
    wake_.notify_one();
  }

 private:
  // Long enough to bridge the gap between two ops of a step, and short enough to free a shared core
  // soon.
  static constexpr std::chrono::microseconds kSpin{100};
  static constexpr std::chrono::microseconds kYieldAfter{20};

  template <typename Ready>
  static bool spin(const Ready& ready, bool yields) {
    const auto start = std::chrono::steady_clock::now();
    while (true) {
      for (int round = 0; round < 32; ++round) {
        if (ready()) return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("isb");  // waits a few cycles; the yield instruction does not
#endif
      }
      auto spent = std::chrono::steady_clock::now() - start;
      if (spent > kSpin) return false;
      if (yields && spent > kYieldAfter) std::this_thread::yield();
    }
  }

  std::atomic<bool> sleeps_{false};
  std::mutex lock_;
  std::condition_variable wake_;
};

class Pool {
 public:
  // Starts at most max_running threads, including the caller; 0: as many as the first caller has
  // CPUs. Workers inherit the affinity mask of the first caller, so more threads would only share
  // its CPUs.
  explicit Pool(int num_threads, int max_running = 0)
      : num_threads_(num_threads), max_running_(max_running) {}
  ~Pool() { stop(); }

  int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }

  void resize(int num_threads);

  void run(int64_t num_chunks, void (*fn)(void*, int64_t), void* context);

 private:
  struct alignas(128) Worker {
    Sleeper sleeper;
    std::thread thread;
  };

  void start();
  void stop();
  void worker_loop(int index);
  void wake_workers(int index);
  void work(int index);
  void call(int64_t chunk);

  std::atomic<int> num_threads_;
  const int max_running_;
  std::mutex busy_;  // held by the host thread whose job runs, and while workers start or stop

  // Guarded by busy_; workers read what was written before they were started.
  bool started_ = false;
  std::vector<std::unique_ptr<Worker>> workers_;  // worker i is thread i + 1
  std::unique_ptr<Claims> claims_;
  std::vector<int> nodes_;  // memory node of each CPU; empty: one node

  // The current job: written before it is published, and read by threads that have claimed one of
  // its chunks.
  void (*fn_)(void*, int64_t) = nullptr;
  void* context_ = nullptr;

  std::mutex error_lock_;
  int64_t error_chunk_ = -1;  // lowest chunk that threw; guarded by error_lock_, like error_
  std::exception_ptr error_;

  alignas(128) std::atomic<uint64_t> job_{0};  // number of jobs so far; stop() counts as a job
  std::atomic<int> wanted_{0};                 // number of workers for which the job has chunks
  std::atomic<int> callers_cpu_{-1};           // CPU of the publishing thread; -1: unknown
  std::atomic<bool> stopping_{false};
  alignas(128) Sleeper caller_;
};

}  // namespace specops
