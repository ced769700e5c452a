// SPDX-License-Identifier: Apache-2.0
// Limits of a core: the issue rates of the instructions in the kernels' inner loops, and the
// latency of a read from memory that no prefetcher can predict. Compiled at first use into
// bench/work/ and called through ctypes; not part of the package.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Enough independent chains to hide the latency of each.
constexpr int kChains = 12;
constexpr int64_t kRounds = 4096;

// Keeps the compiler from merging steps or removing chains.
template <typename Vector>
inline void keep(Vector& chain) {
  asm volatile("" : "+x"(chain));
}

// Runs `step` on each chain in turn for `seconds`; returns the steps per second.
template <typename Vector, typename Step>
double steps_per_second(double seconds, Vector first, Step step, volatile float* sink) {
  // Separate variables stay in registers; an array might not.
  Vector a = first, b = first, c = first, d = first, e = first, f = first;
  Vector g = first, h = first, i = first, j = first, k = first, l = first;
  const auto advance = [&step](auto&... chain) {
    (step(chain), ...);
    (keep(chain), ...);
  };
  int64_t rounds = 0;
  const auto start = Clock::now();
  do {
    for (int64_t round = 0; round < kRounds; ++round) advance(a, b, c, d, e, f, g, h, i, j, k, l);
    rounds += kRounds;
  } while (seconds_since(start) < seconds);
  const double elapsed = seconds_since(start);
  float out;
  for (const Vector& chain : {a, b, c, d, e, f, g, h, i, j, k, l}) {
    std::memcpy(&out, &chain, sizeof(out));
    *sink = out;
  }
  return static_cast<double>(rounds * kChains) / elapsed;
}

// Returns the steps per second of one thread; negative if this CPU lacks the instruction.
double rate(const char* what, double seconds, volatile float* sink) {
  const auto is = [what](const char* name) { return std::strcmp(what, name) == 0; };
#if defined(__AVX512F__)
  if (is("fma512")) {
    const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(1e-3f);
    return steps_per_second(
        seconds, a, [&](__m512& x) { x = _mm512_fmadd_ps(x, a, b); }, sink);
  }
  if (is("widen512")) {
    // Widens sixteen bf16 to floats, as in each step of the kernels that have no dot products of
    // pairs.
    return steps_per_second(
        seconds,
        _mm512_set1_epi32(3),
        [](__m512i& x) {
          x = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)), 16);
        },
        sink);
  }
#endif
#if defined(__AVX512BF16__)
  if (is("dpbf16_512")) {
    const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3c00);
    return steps_per_second(
        seconds, _mm512_set1_ps(1.0f), [&](__m512& x) { x = _mm512_dpbf16_ps(x, a, a); }, sink);
  }
#endif
#if defined(__AVX2__) && defined(__FMA__)
  if (is("fma256")) {
    const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(1e-3f);
    return steps_per_second(
        seconds, a, [&](__m256& x) { x = _mm256_fmadd_ps(x, a, b); }, sink);
  }
  if (is("widen256")) {
    return steps_per_second(
        seconds,
        _mm256_set1_epi32(3),
        [](__m256i& x) {
          x = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), 16);
        },
        sink);
  }
#endif
  return -1.0;
}

}  // namespace

// Returns the sum of rate() over `num_threads` concurrent threads; negative if this CPU lacks the
// instruction.
extern "C" double issue_rate(const char* what, double seconds, int num_threads) {
  double rates[64] = {};
  float sinks[64] = {};
  std::thread helpers[64];
  const auto run = [&](int t) { rates[t] = rate(what, seconds, &sinks[t]); };
  for (int t = 1; t < num_threads; ++t) helpers[t] = std::thread(run, t);
  run(0);
  for (int t = 1; t < num_threads; ++t) helpers[t].join();
  return std::accumulate(rates, rates + num_threads, 0.0);
}

// Returns the nanoseconds of a read whose address is the result of the previous read, in `bytes` of
// memory.
extern "C" double latency_ns(int64_t bytes, int64_t reads) {
  struct alignas(64) Line {
    uint64_t next;
  };
  const auto count = static_cast<uint64_t>(bytes / static_cast<int64_t>(sizeof(Line)));
  std::vector<Line> lines(count);
  std::vector<uint64_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(1));
  for (uint64_t i = 0; i < count; ++i) lines[order[i]].next = order[(i + 1) % count];
  uint64_t at = 0;
  const auto start = Clock::now();
  for (int64_t i = 0; i < reads; ++i) at = lines[at].next;
  const double elapsed = seconds_since(start);
  volatile uint64_t sink = at;
  (void)sink;
  return elapsed / static_cast<double>(reads) * 1e9;
}
