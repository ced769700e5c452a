// SPDX-License-Identifier: Apache-2.0
// Drives the thread pool without Python: test_threads.py compiles this together with parallel.cpp.
// Prints what went wrong, and returns 1.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "common/parallel.h"

namespace {

void require(bool condition, const char* what) {
  if (condition) return;
  std::printf("failed: %s\n", what);
  std::fflush(stdout);
  _exit(1);
}

// Every item of [0, size) is visited exactly once, and seen by the caller afterwards.
void one_job(int64_t size, int64_t grain) {
  std::vector<int32_t> visits(static_cast<size_t>(size), 0);  // plain: the pool must publish them
  specops::parallel_for(size, grain, [&](int64_t begin, int64_t end) {
    int index = specops::thread_index();
    require(index >= 0 && index < specops::num_threads(), "thread_index is below num_threads");
    for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
  });
  for (int32_t count : visits) require(count == 1, "every item is visited exactly once");
}

void many_jobs(int jobs) {
  for (int job = 0; job < jobs; ++job) one_job(1 + job % 97, 1 + job % 5);
  one_job(0, 4);
  one_job(100000, 3);
}

void nested() {
  std::atomic<int64_t> sum{0};
  specops::parallel_for(20, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int outer = specops::thread_index();
      specops::parallel_for(30, 4, [&](int64_t first, int64_t last) {
        require(specops::thread_index() == outer, "a nested call stays on its thread");
        sum += last - first;
      });
    }
  });
  require(sum == 600, "nested calls do all their work");
}

void two_hosts() {
  std::thread other([] { many_jobs(3000); });
  many_jobs(3000);
  other.join();
}

void resize_while_busy() {
  std::thread other([] { many_jobs(2000); });
  for (int i = 0; i < 40; ++i) specops::set_num_threads(1 + i % 4);
  other.join();
}

// A child has only the thread that forked, and may fork while another thread's job is running.
void forked(int num_threads) {
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) many_jobs(10);
  });
  for (int i = 0; i < 20; ++i) {
    pid_t child = fork();
    require(child >= 0, "fork");
    if (child == 0) {
      alarm(20);  // a deadlock ends the child
      many_jobs(200);
      specops::set_num_threads(num_threads == 1 ? 2 : 1);
      many_jobs(200);
      specops::set_num_threads(num_threads);
      many_jobs(200);
      _exit(0);
    }
    int status = 1;
    require(waitpid(child, &status, 0) == child, "waitpid");
    require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the pool works in a forked child");
    many_jobs(10);
  }
  stop = true;
  other.join();
}

}  // namespace

int main(int argc, char** argv) {
  int num_threads = argc > 1 ? std::atoi(argv[1]) : 2;
  bool fork_too = argc > 2 && std::strcmp(argv[2], "fork") == 0;
  specops::set_num_threads(num_threads);
  require(specops::num_threads() == num_threads, "num_threads says what was set");
  many_jobs(5000);
  nested();
  two_hosts();
  if (fork_too) forked(num_threads);
  resize_while_busy();
  return 0;
}
