// SPDX-License-Identifier: Apache-2.0
// common/parallel.h on OpenMP: ggml's CPU backend uses the same threads between our operations, so
// that no thread waits for a core on which another pool spins.
#include <omp.h>

#include <atomic>
#include <exception>

#include "common/parallel.h"

namespace specops {
namespace {

thread_local int threads = 0;  // 0: as many as there are CPUs
thread_local int index_of_thread = 0;
thread_local bool inside_chunk = false;

}  // namespace

void set_num_threads(int num_threads) { threads = num_threads; }

int num_threads() { return threads > 0 ? threads : omp_get_num_procs(); }

int thread_index() { return index_of_thread; }

void parallel_chunks(int64_t num_chunks, void (*fn)(void*, int64_t), void* context) {
  int team = static_cast<int>(num_chunks < num_threads() ? num_chunks : num_threads());
  if (team <= 1 || inside_chunk) {
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) fn(context, chunk);
    return;
  }
  std::atomic<int64_t> next{0};
  std::exception_ptr failure;
  int all = num_threads();
#pragma omp parallel num_threads(all)
  {
    int outer = index_of_thread;
    threads = all;
    index_of_thread = omp_get_thread_num();
    inside_chunk = true;
    try {
      for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < num_chunks;) {
        fn(context, chunk);
      }
    } catch (...) {
#pragma omp critical(specops_failure)
      failure = std::current_exception();
    }
    inside_chunk = false;
    index_of_thread = outer;
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace specops
