// SPDX-License-Identifier: Apache-2.0
// The read bandwidth of every figure: how fast this machine reads memory at the moment, with N
// threads. Compiled at first use into bench/work/ and called through ctypes; not part of the
// package.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

namespace {

// A cache line; the compiler divides it into the vectors that the CPU has.
using Line __attribute__((vector_size(64))) = uint64_t;

// Sums the lines in four streams, one per quarter of the memory. A single stream is limited by its
// loads and prefetches in flight and leaves a fifth to a third of the bandwidth unused.
uint64_t sum_lines(const Line* lines, int64_t count) {
  Line sums[8] = {};
  const int64_t quarter = count / 4;
  for (int64_t i = 0; i < quarter; i += 2) {
    for (int stream = 0; stream < 4; ++stream) {
      const Line* line = lines + stream * quarter + i;
      sums[2 * stream] += line[0];
      sums[2 * stream + 1] += line[1];
    }
  }
  Line sum = {};
  for (const Line& part : sums) sum += part;
  uint64_t total = 0;
  for (int lane = 0; lane < 8; ++lane) total += sum[lane];
  return total;
}

}  // namespace

// Reads `bytes` from `data` once and returns GB/s (10^9). Threads claim the next MiB from a
// counter, as kernels do, so that a delayed thread does not delay the measurement.
extern "C" double read_gb_s(const void* data, int64_t bytes, int num_threads, uint64_t* sink) {
  constexpr int64_t kLines = (1 << 20) / sizeof(Line);
  // Lines must be aligned; the caller's memory may begin anywhere.
  const auto address = (reinterpret_cast<uintptr_t>(data) + 63) / 64 * 64;
  const auto* lines = reinterpret_cast<const Line*>(address);
  const int64_t chunks = (bytes - 64) >> 20;
  std::atomic<int64_t> next{0};
  std::thread helpers[64];
  uint64_t sums[64] = {};
  const auto read = [&](int thread) {
    for (int64_t chunk; (chunk = next++) < chunks;) {
      sums[thread] += sum_lines(lines + chunk * kLines, kLines);
    }
  };
  const auto start = std::chrono::steady_clock::now();
  for (int t = 1; t < num_threads; ++t) helpers[t] = std::thread(read, t);
  read(0);
  for (int t = 1; t < num_threads; ++t) helpers[t].join();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  for (uint64_t sum : sums) *sink += sum;
  return static_cast<double>(chunks << 20) / elapsed.count() * 1e-9;
}
