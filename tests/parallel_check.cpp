// SPDX-License-Identifier: Apache-2.0
// Drives the thread pool without Python: test_threads.py compiles this together with the pool. It
// runs the requested number of threads, however few CPUs there are. Prints errors and returns 1.
//
//   parallel_check NUM_THREADS [fork]
#ifdef __linux__
#include <sched.h>
#endif
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "common/parallel.h"
#include "common/pool.h"

namespace {

using specops::Pool;

void require(bool condition, const char* what) {
  if (condition) return;
  std::printf("failed: %s\n", what);
  std::fflush(stdout);
  _exit(1);
}

template <typename Fn>
void run(Pool& pool, int64_t num_chunks, Fn fn) {
  pool.run(num_chunks, [](void* raw, int64_t chunk) { (*static_cast<Fn*>(raw))(chunk); }, &fn);
}

// Checks that every chunk runs exactly once and that the caller sees its results.
void one_job(Pool& pool, int64_t size) {
  std::vector<int32_t> visits(static_cast<size_t>(size), 0);  // plain: the pool must publish them
  run(pool, size, [&](int64_t chunk) { ++visits[static_cast<size_t>(chunk)]; });
  for (int32_t count : visits) require(count == 1, "every chunk is run exactly once");
}

void many_jobs(Pool& pool, int jobs) {
  for (int job = 0; job < jobs; ++job) one_job(pool, 1 + job % 197);
  one_job(pool, 0);
  one_job(pool, 30000);
}

void thread_indices(Pool& pool) {
  std::vector<std::atomic<int>> taken(static_cast<size_t>(pool.num_threads()));
  run(pool, 5000, [&](int64_t) {
    int index = specops::thread_index();
    require(index >= 0 && index < pool.num_threads(), "thread_index is below num_threads");
    auto& mine = taken[static_cast<size_t>(index)];
    require(mine.exchange(1) == 0, "no two threads have one index");
    mine.store(0);
  });
}

void nested(Pool& pool) {
  std::atomic<int64_t> sum{0};
  run(pool, 20, [&](int64_t) {
    int outer = specops::thread_index();
    run(pool, 8, [&](int64_t) {
      require(specops::thread_index() == outer, "a nested call stays on its thread");
      run(pool, 3, [&](int64_t) { ++sum; });
    });
  });
  require(sum == 480, "nested calls do all their work");
}

// Checks that the caller gets the exception of the chunk with the lowest number, and that the pool
// continues.
void exceptions(Pool& pool) {
  for (int job = 0; job < 300; ++job) {
    std::atomic<int> begun{0}, ended{0};
    int thrown = -1;
    try {
      run(pool, 100, [&](int64_t chunk) {
        ++begun;
        if (chunk % 20 == job % 20) {
          ++ended;
          throw static_cast<int>(chunk);
        }
        ++ended;
      });
    } catch (int chunk) {
      thrown = chunk;
    }
    require(thrown == job % 20, "the first chunk's exception arrives");
    require(begun == ended, "and no chunk is still running");
    one_job(pool, 50);
    int inner = 0;
    try {
      run(pool, 10, [&](int64_t) { run(pool, 10, [](int64_t) { throw std::bad_alloc(); }); });
    } catch (const std::bad_alloc&) {
      inner = 1;
    }
    require(inner == 1, "out of a nested call as well");
    nested(pool);
  }
}

void several_hosts(Pool& pool) {
  std::vector<std::thread> hosts;
  for (int i = 0; i < 4; ++i) hosts.emplace_back([&] { many_jobs(pool, 600); });
  many_jobs(pool, 600);
  for (std::thread& host : hosts) host.join();
}

// Pauses between jobs, so that spinning threads go to sleep and sleeping threads are woken.
void with_pauses(Pool& pool) {
  for (int pause_us : {1, 50, 95, 100, 105, 200, 1000}) {
    for (int i = 0; i < 40; ++i) {
      one_job(pool, 1 + i * 7);
      usleep(static_cast<useconds_t>(pause_us));
    }
  }
}

void resize_while_busy(Pool& pool, int num_threads) {
  std::atomic<bool> stop{false};
  std::vector<std::thread> hosts;
  for (int i = 0; i < 2; ++i) {
    hosts.emplace_back([&] {
      while (!stop) many_jobs(pool, 20);
    });
  }
  for (int i = 0; i < 40; ++i) pool.resize(1 + i * 5 % num_threads);
  stop = true;
  for (std::thread& host : hosts) host.join();
  pool.resize(num_threads);
}

// Checks the pool in a forked child, which has only the thread that forked. The fork may happen
// while a job of another thread runs.
void forked(int num_threads) {
  auto many = [](int jobs) {
    for (int job = 0; job < jobs; ++job) {
      std::vector<int32_t> visits(static_cast<size_t>(1 + job % 97), 0);
      auto size = static_cast<int64_t>(visits.size());
      specops::parallel_for(size, 1 + job % 5, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
      });
      for (int32_t count : visits) require(count == 1, "every item is visited exactly once");
    }
  };
  specops::set_num_threads(num_threads);
  require(specops::num_threads() == num_threads, "num_threads says what was set");
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) many(10);
  });
  for (int i = 0; i < 20; ++i) {
    pid_t child = fork();
    require(child >= 0, "fork");
    if (child == 0) {
      alarm(20);  // a deadlock ends the child
      many(200);
      specops::set_num_threads(num_threads == 1 ? 2 : 1);
      many(200);
      specops::set_num_threads(num_threads);
      many(200);
      _exit(0);
    }
    int status = 1;
    require(waitpid(child, &status, 0) == child, "waitpid");
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the pool works in a forked child");
    many(10);
  }
  stop = true;
  other.join();
}

#ifdef __linux__
void run_on(const cpu_set_t& mask) {
  require(sched_setaffinity(0, sizeof mask, &mask) == 0, "a thread may choose among its CPUs");
}

// Checks that a worker leaves its caller's CPU, unless other code has bound the worker to it.
void apart() {
  cpu_set_t whole, mine, found, seen;
  CPU_ZERO(&whole);
  if (sched_getaffinity(0, sizeof whole, &whole) != 0 || CPU_COUNT(&whole) < 2) return;
  Pool pool(2, 2);
  // One chunk for each of the two threads.
  auto both = [&](auto on_worker) {
    std::atomic<int> begun{0};
    run(pool, 2, [&](int64_t) {
      ++begun;
      while (begun < 2) std::this_thread::yield();
      if (specops::thread_index() == 1) on_worker();
    });
  };
  both([] {});  // now the worker has the mask of its caller
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &whole)) continue;
    CPU_ZERO(&mine);
    CPU_SET(cpu, &mine);
    run_on(mine);  // the caller's CPU; its worker must find another one
    both([&] {
      run_on(mine);
      run_on(whole);  // and stays until it is moved
    });
    // The system may move a worker there after it has looked. It then leaves with the next job.
    int there = 0;
    for (int job = 0; job < 20; ++job) {
      both([&] { there += sched_getcpu() == cpu; });
    }
    require(there < 10, "a worker leaves its caller's CPU");
    both([&] { sched_getaffinity(0, sizeof found, &found); });
    CPU_XOR(&seen, &found, &whole);
    require(CPU_COUNT(&seen) < 2, "and stays off at most one");
    both([&] { run_on(mine); });
    int where = -1;
    both([&] { where = sched_getcpu(); });
    require(where == cpu, "a worker stays where it is pinned");
    both([&] { run_on(whole); });
  }
  run_on(whole);
}
#endif

}  // namespace

int main(int argc, char** argv) {
  int num_threads = argc > 1 ? std::atoi(argv[1]) : 2;
  {
    Pool pool(num_threads, num_threads);
    require(pool.num_threads() == num_threads, "a pool has the threads it was made with");
    many_jobs(pool, 2000);
    thread_indices(pool);
    nested(pool);
    exceptions(pool);
    several_hosts(pool);
    with_pauses(pool);
    resize_while_busy(pool, num_threads);
    many_jobs(pool, 200);
  }
#ifdef __linux__
  apart();
#endif
  if (argc > 2 && std::strcmp(argv[2], "fork") == 0) forked(num_threads);
  return 0;
}
