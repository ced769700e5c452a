// SPDX-License-Identifier: Apache-2.0
// Thread pool of the CPU kernels. Work is divided into chunks that any thread may claim. The result
// of a chunk never depends on the thread that claims it, so the number of threads does not affect
// the bits of a result.
#pragma once

#include <cstdint>
#include <type_traits>

namespace specops {

constexpr int kMaxThreads = 1024;

// Sets the number of threads, including the calling thread: 1 to kMaxThreads. At most as many
// threads run as the first caller has CPUs; these threads also do the work of the missing ones.
// Must not be called inside a chunk.
void set_num_threads(int num_threads);
int num_threads();  // like all calls here, throws what default_num_threads() (cpus.h) throws

// Returns the index of this thread in the running parallel_for, below num_threads(); 0 is the
// caller.
int thread_index();

// Runs fn(context, chunk) for every chunk in [0, num_chunks). The calling thread takes part, and
// waits only for chunks that other threads have begun. If called inside a chunk, or by a second
// host thread while the pool is busy, it runs all chunks serially in the calling thread. If chunks
// throw, the exception of the chunk with the lowest number is rethrown once all started chunks have
// ended; higher chunks may or may not have run.
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
