// SPDX-License-Identifier: Apache-2.0
// The read line of every figure: how fast this machine reads memory right now, with N threads.
// Compiled at first use into bench/work/ and called through ctypes; no part of the product.
#include <chrono>
#include <cstdint>
#include <thread>

namespace {

// Eight independent sums of a cache line each keep enough loads in flight; the compiler vectorises.
uint64_t sum_words(const uint64_t* words, int64_t count) {
  uint64_t lanes[64] = {};
  for (int64_t i = 0; i + 64 <= count; i += 64) {
    for (int lane = 0; lane < 64; ++lane) lanes[lane] += words[i + lane];
  }
  uint64_t total = 0;
  for (uint64_t lane : lanes) total += lane;
  return total;
}

}  // namespace

// Reads `bytes` from `data` once, split evenly over `num_threads`; returns GB/s (10^9).
extern "C" double read_gb_s(const void* data, int64_t bytes, int num_threads, uint64_t* sink) {
  const auto* words = static_cast<const uint64_t*>(data);
  const int64_t share = bytes / 8 / num_threads / 64 * 64;
  std::thread helpers[64];
  uint64_t sums[64] = {};
  const auto start = std::chrono::steady_clock::now();
  for (int t = 1; t < num_threads; ++t) {
    helpers[t] = std::thread([&, t] { sums[t] = sum_words(words + t * share, share); });
  }
  sums[0] = sum_words(words, share);
  for (int t = 1; t < num_threads; ++t) helpers[t].join();
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  for (uint64_t sum : sums) *sink += sum;
  return static_cast<double>(share) * 8 * num_threads / elapsed.count() * 1e-9;
}
