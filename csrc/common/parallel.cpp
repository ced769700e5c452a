// SPDX-License-Identifier: Apache-2.0
// Threads claim chunks from one counter. The counter carries the job's number in its upper half, so
// a thread that wakes late can never claim a chunk of a job whose fields it has not read.
#include "common/parallel.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__) || defined(__APPLE__)
#include <pthread.h>
#endif
#ifdef __linux__
#include <sched.h>
#endif

namespace specops {
namespace {

// Long enough to bridge the gap between two ops of a step, short enough to leave a shared core.
constexpr int kSpinRounds = 4000;
constexpr uint64_t kChunkMask = 0xffffffffu;

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int usable_cpus() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
  int count = static_cast<int>(std::thread::hardware_concurrency());
  return count > 0 ? count : 1;
}

thread_local int tls_thread_index = 0;
thread_local bool tls_inside_chunk = false;

class Pool {
 public:
  explicit Pool(int num_threads) : size_(num_threads) {}

  int size() const { return size_.load(std::memory_order_relaxed); }

  void resize(int num_threads) {
    std::lock_guard<std::mutex> guard(busy_);
    stop();
    size_.store(num_threads, std::memory_order_relaxed);
  }

  void run(int64_t num_chunks, void (*fn)(void*, int64_t), void* context) {
    if (num_chunks <= 0) return;
    if (num_chunks == 1 || size() == 1 || tls_inside_chunk || !busy_.try_lock()) {
      serial(num_chunks, fn, context);
      return;
    }
    std::lock_guard<std::mutex> guard(busy_, std::adopt_lock);
    if (workers_.empty()) start();
    // Larger jobs than the counter's lower half can number are run in slices.
    constexpr int64_t kSlice = int64_t{1} << 30;
    for (int64_t first = 0; first < num_chunks; first += kSlice) {
      int64_t count = num_chunks - first < kSlice ? num_chunks - first : kSlice;
      publish(first, count, fn, context);
      work();
      while (done_.load(std::memory_order_acquire) != count) cpu_relax();
    }
  }

 private:
  static void serial(int64_t num_chunks, void (*fn)(void*, int64_t), void* context) {
    bool outer = tls_inside_chunk;
    tls_inside_chunk = true;
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) fn(context, chunk);
    tls_inside_chunk = outer;
  }

  void publish(int64_t first, int64_t count, void (*fn)(void*, int64_t), void* context) {
    uint64_t job = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    // First a ticket that nobody can claim, then the fields, then the real ticket. Each field is
    // released: else a CPU with weak memory may show it before the ticket that nobody can claim, and
    // an old ticket would claim a chunk of the new job.
    ticket_.store((job << 32) | kChunkMask, std::memory_order_seq_cst);
    first_.store(first, std::memory_order_release);
    count_.store(count, std::memory_order_release);
    fn_.store(fn, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    done_.store(0, std::memory_order_relaxed);
    ticket_.store((job + 1) << 32, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> guard(sleep_);
      wake_.notify_all();
    }
  }

  // Claims chunks of the published job until none is left; returns the job's number.
  uint64_t work() {
    while (true) {
      uint64_t ticket = ticket_.load(std::memory_order_seq_cst);
      int64_t chunk = static_cast<int64_t>(ticket & kChunkMask);
      int64_t count = count_.load(std::memory_order_acquire);
      int64_t first = first_.load(std::memory_order_acquire);
      auto fn = fn_.load(std::memory_order_acquire);
      void* context = context_.load(std::memory_order_acquire);
      if (static_cast<uint64_t>(chunk) == kChunkMask || chunk >= count) return ticket >> 32;
      // Success means the job has not changed since its number was read: the fields are its own, for
      // who has acquired one of a later job sees at least the ticket that nobody can claim.
      if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_seq_cst)) continue;
      tls_inside_chunk = true;
      fn(context, first + chunk);
      tls_inside_chunk = false;
      done_.fetch_add(1, std::memory_order_release);
    }
  }

  void worker_loop(int index) {
    tls_thread_index = index;
    while (!stopping_.load(std::memory_order_seq_cst)) {
      uint64_t seen = work();
      bool fresh = false;
      for (int round = 0; round < kSpinRounds && !fresh; ++round) {
        cpu_relax();
        fresh = (ticket_.load(std::memory_order_relaxed) >> 32) != seen ||
                stopping_.load(std::memory_order_relaxed);
      }
      if (fresh) continue;
      std::unique_lock<std::mutex> lock(sleep_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] {
        return (ticket_.load(std::memory_order_seq_cst) >> 32) != seen ||
               stopping_.load(std::memory_order_seq_cst);
      });
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  void start() {
    stopping_.store(false, std::memory_order_seq_cst);
    for (int index = 1; index < size(); ++index) {
      workers_.emplace_back([this, index] { worker_loop(index); });
    }
  }

  void stop() {
    {
      std::lock_guard<std::mutex> guard(sleep_);
      stopping_.store(true, std::memory_order_seq_cst);
      wake_.notify_all();
    }
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  std::atomic<int> size_;
  std::vector<std::thread> workers_;
  std::mutex busy_;  // held by the host thread whose job is running

  alignas(64) std::atomic<uint64_t> ticket_{kChunkMask};  // job number << 32 | next chunk
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int64_t> first_{0};
  std::atomic<int64_t> count_{0};
  std::atomic<void (*)(void*, int64_t)> fn_{nullptr};
  std::atomic<void*> context_{nullptr};

  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::mutex sleep_;
  std::condition_variable wake_;
};

// Never destroyed: worker threads may outlive static destruction order.
Pool*& pool() {
  static Pool* instance = [] {
#if defined(__linux__) || defined(__APPLE__)
    // A forked child has neither the workers nor a way to open locks that other threads held: it
    // starts over, and leaves the parent's pool behind as it is.
    pthread_atfork(nullptr, nullptr, [] { pool() = new Pool(pool()->size()); });
#endif
    return new Pool(usable_cpus());
  }();
  return instance;
}

}  // namespace

void set_num_threads(int num_threads) { pool()->resize(num_threads); }
int num_threads() { return pool()->size(); }
int thread_index() { return tls_thread_index; }

void parallel_chunks(int64_t num_chunks, void (*fn)(void*, int64_t), void* context) {
  pool()->run(num_chunks, fn, context);
}

}  // namespace specops
