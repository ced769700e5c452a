// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"

#include <algorithm>
#include <new>
#include <system_error>

#include "common/cpus.h"
#include "common/pool.h"

#if defined(__linux__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace specops {
namespace {

thread_local int tls_thread_index = 0;
thread_local bool tls_inside_chunk = false;

// Marks that this thread is running a chunk: nested parallel calls then run serially in this
// thread.
class InsideChunk {
 public:
  InsideChunk() : outer_(tls_inside_chunk) { tls_inside_chunk = true; }
  ~InsideChunk() { tls_inside_chunk = outer_; }
  InsideChunk(const InsideChunk&) = delete;
  InsideChunk& operator=(const InsideChunk&) = delete;

 private:
  bool outer_;
};

void run_serially(int64_t num_chunks, void (*fn)(void*, int64_t), void* context) {
  InsideChunk inside;
  for (int64_t chunk = 0; chunk < num_chunks; ++chunk) fn(context, chunk);
}

// Returns the memory node on which the calling thread runs. The thread may have moved when the
// function returns; then a chunk is merely read from more distant memory.
int node_of(const std::vector<int>& nodes) {
  if (nodes.empty()) return 0;
  int cpu = current_cpu();
  return cpu >= 0 && cpu < static_cast<int>(nodes.size()) ? nodes[static_cast<size_t>(cpu)] : 0;
}

std::vector<int> cpus_of_node(const std::vector<int>& cpus, const std::vector<int>& nodes) {
  if (nodes.empty()) return {1};
  std::vector<int> counts(static_cast<size_t>(*std::max_element(nodes.begin(), nodes.end())) + 1,
                          0);
  for (int cpu : cpus) {
    size_t node = cpu < static_cast<int>(nodes.size()) ? static_cast<size_t>(nodes[cpu]) : 0;
    ++counts[node];
  }
  return counts;
}

}  // namespace

void Pool::resize(int num_threads) {
  std::lock_guard<std::mutex> guard(busy_);
  stop();
  num_threads_.store(num_threads, std::memory_order_relaxed);
}

void Pool::run(int64_t num_chunks, void (*fn)(void*, int64_t), void* context) {
  if (num_chunks <= 0) return;
  if (num_chunks == 1 || num_threads() == 1 || tls_inside_chunk || !busy_.try_lock()) {
    return run_serially(num_chunks, fn, context);
  }
  std::unique_lock<std::mutex> guard(busy_, std::adopt_lock);
  if (!started_) start();
  if (workers_.empty()) {
    guard.unlock();
    return run_serially(num_chunks, fn, context);
  }
  fn_ = fn;
  context_ = context;
  claims_->publish(num_chunks);
  int64_t workers = static_cast<int64_t>(workers_.size());
  wanted_.store(static_cast<int>(std::min(num_chunks - 1, workers)), std::memory_order_relaxed);
  callers_cpu_.store(current_cpu(), std::memory_order_relaxed);
  // Workers look for chunks only after this increment: as all chunks are published by then, no
  // worker gives up too early. It is sequentially consistent with the workers' `sleeps_` (Sleeper),
  // and workers acquire the job through its number.
  job_.fetch_add(1, std::memory_order_seq_cst);
  wake_workers(0);
  work(0);
  caller_.wait([this] { return claims_->finished(); }, true);
  if (error_chunk_ < 0) return;  // finished() has acquired the writes of all chunks
  error_chunk_ = -1;
  std::exception_ptr error = std::move(error_);
  error_ = nullptr;
  guard.unlock();
  std::rethrow_exception(error);
}

void Pool::call(int64_t chunk) {
  try {
    fn_(context_, chunk);
  } catch (...) {
    std::lock_guard<std::mutex> guard(error_lock_);
    if (error_chunk_ >= 0 && error_chunk_ < chunk) return;
    error_chunk_ = chunk;
    error_ = std::current_exception();
  }
}

// Claims and runs chunks until none is left.
void Pool::work(int index) {
  InsideChunk inside;
  Claims::Way way{.home = claims_->groups().home(index, node_of(nodes_))};
  auto on_finished = [this] { caller_.wake(); };
  for (int64_t chunk; (chunk = claims_->claim(way, on_finished)) >= 0;) call(chunk);
}

// Wakes sleeping workers as a tree: each one wakes two more, so that no thread has to wake many.
// Workers that spin notice the job without being woken.
void Pool::wake_workers(int index) {
  int wanted = wanted_.load(std::memory_order_relaxed);
  for (int child = 2 * index + 1; child <= 2 * index + 2 && child <= wanted; ++child) {
    workers_[static_cast<size_t>(child) - 1]->sleeper.wake();
  }
}

void Pool::worker_loop(int index) {
  tls_thread_index = index;
  Sleeper& sleeper = workers_[static_cast<size_t>(index) - 1]->sleeper;
  AvoidedCpu avoided;
  uint64_t seen = 0;
  while (true) {
    sleeper.wait([&] { return job_.load(std::memory_order_seq_cst) != seen; }, false);
    seen = job_.load(std::memory_order_acquire);
    if (stopping_.load(std::memory_order_relaxed)) return;
    wake_workers(index);
    // Linux may wake a worker on the CPU of its caller although another CPU is idle: if few CPUs
    // share a cache, it hardly searches for an idle one. Both threads would then share that CPU as
    // long as there is work, so the worker avoids the CPU.
    int cpu = callers_cpu_.load(std::memory_order_relaxed);
    if (cpu >= 0 && cpu == current_cpu()) avoided.set(cpu);
    work(index);
  }
}

void Pool::start() {
  std::vector<int> cpus = allowed_cpus();
  int running = max_running_ > 0 ? max_running_ : static_cast<int>(cpus.size());
  running = std::min(running, num_threads());
  nodes_ = nodes_of_cpus();
  claims_ = std::make_unique<Claims>(ThreadGroups::of(running, cpus_of_node(cpus, nodes_)));
  started_ = true;
  // Create all workers first, because workers access each other.
  for (int i = 1; i < running; ++i) workers_.push_back(std::make_unique<Worker>());
  job_.store(0, std::memory_order_relaxed);
  stopping_.store(false, std::memory_order_relaxed);
  for (int i = 1; i < running; ++i) {
    try {
      workers_[static_cast<size_t>(i) - 1]->thread = std::thread([this, i] { worker_loop(i); });
    } catch (const std::system_error&) {
      // The system provides no more threads: the threads that run also process the chunks of the
      // missing ones.
      return;
    }
  }
}

void Pool::stop() {
  stopping_.store(true, std::memory_order_relaxed);  // published with the new job number
  job_.fetch_add(1, std::memory_order_seq_cst);
  for (auto& worker : workers_) worker->sleeper.wake();
  for (auto& worker : workers_) {
    if (worker->thread.joinable()) worker->thread.join();
  }
  workers_.clear();
  started_ = false;
}

namespace {

// Never destroyed: worker threads may outlive static destruction order.
Pool*& pool() {
  static Pool* instance = [] {
    int num_threads = default_num_threads();
#if defined(__linux__) || defined(__APPLE__)
    // A forked child has no workers and cannot release locks that other threads held. It creates a
    // new pool and leaks the one of the parent.
    pthread_atfork(nullptr, nullptr, [] { pool() = new Pool(pool()->num_threads()); });
#endif
    return new Pool(num_threads);
  }();
  return instance;
}

}  // namespace

void set_num_threads(int num_threads) { pool()->resize(num_threads); }
int num_threads() { return pool()->num_threads(); }
int thread_index() { return tls_thread_index; }

void parallel_chunks(int64_t num_chunks, void (*fn)(void*, int64_t), void* context) {
  pool()->run(num_chunks, fn, context);
}

}  // namespace specops
