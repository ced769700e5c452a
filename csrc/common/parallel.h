// SPDX-License-Identifier: Apache-2.0
// The one thread pool of the CPU kernels. Work is cut into chunks that any thread may claim; what a
// chunk computes never depends on who claims it, so the thread count cannot change a bit.
#pragma once

#include <cstdint>
#include <type_traits>

namespace specops {

void set_num_threads(int num_threads);  // including the caller; >= 1
int num_threads();

// Index of the thread inside the running parallel_for: 0 is the caller, below num_threads().
int thread_index();

// Runs fn(context, chunk) for every chunk in [0, num_chunks). The caller takes part and waits only
// for chunks that others have begun. Calls from inside a chunk, or from a second host thread while
// the pool is busy, run serially in place.
void parallel_chunks(int64_t num_chunks, void (*fn)(void*, int64_t), void* context);

// Calls fn(begin, end) over [0, size) in pieces of `grain` items.
template <typename Fn>
void parallel_for(int64_t size, int64_t grain, Fn&& fn) {
  if (size <= 0) return;
  struct Context {
    std::remove_reference_t<Fn>* fn;
    int64_t size, grain;
  } context{&fn, size, grain < 1 ? 1 : grain};
  int64_t num_chunks = (size + context.grain - 1) / context.grain;
  parallel_chunks(
      num_chunks,
      [](void* raw, int64_t chunk) {
        auto* c = static_cast<Context*>(raw);
        int64_t begin = chunk * c->grain;
        int64_t end = begin + c->grain < c->size ? begin + c->grain : c->size;
        (*c->fn)(begin, end);
      },
      &context);
}

}  // namespace specops
