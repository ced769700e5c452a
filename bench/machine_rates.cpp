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

// Defines the step of an instruction, or of a few that belong together: `code` advances x, which
// holds values of the type of `first`, with an operand a of the same type.
#define SPECOPS_RATE(name, first, code)                                                     \
  if (std::strcmp(what, name) == 0) {                                                       \
    auto a = first;                                                                         \
    asm volatile("" : "+x"(a));                                                             \
    return steps_per_second(seconds, first, [&]([[maybe_unused]] auto& x) { code; }, sink); \
  }

// Returns the steps per second of one thread; negative if this CPU lacks the instruction. Steps that
// consist of several instructions stand for what a kernel does with a vector (bench/limits.py).
double rate(const char* what, double seconds, volatile float* sink) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const __m512 f512 = _mm512_set1_ps(0.5f);
  const __m512i i512 = _mm512_set1_epi32(3), low512 = _mm512_set1_epi8(15);
  const __m512i even512 = _mm512_set1_epi16(255);
  SPECOPS_RATE("fma512", f512, x = _mm512_fmadd_ps(x, a, a))
  SPECOPS_RATE("max512", f512, x = _mm512_max_ps(x, a))
  SPECOPS_RATE(
      "widen512", i512, x = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(x)), 16))
  SPECOPS_RATE("widen_fp8_512", i512, {
    __m256i words = _mm256_cvtepi8_epi16(_mm512_castsi512_si128(x));
    words = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(-0x4080));
    x = _mm512_castps_si512(_mm512_cvtph_ps(words));
  })
  SPECOPS_RATE("split512", i512, {
    __m512i odd = _mm512_srli_epi16(x, 8);
    keep(odd);
    x = _mm512_and_si512(x, even512);
  })
  SPECOPS_RATE("halves512", i512, {
    __m512i high = _mm512_and_si512(_mm512_srli_epi16(x, 4), low512);
    keep(high);
    x = _mm512_and_si512(x, low512);
  })
  SPECOPS_RATE("madd512", i512, x = _mm512_add_epi32(x, _mm512_madd_epi16(x, a)))
#endif
#if defined(__AVX512VNNI__)
  SPECOPS_RATE("dpwssd512", i512, x = _mm512_dpwssd_epi32(x, a, a))
  SPECOPS_RATE("dpbusd512", i512, x = _mm512_dpbusd_epi32(x, a, a))
#endif
#if defined(__AVX512BF16__)
  SPECOPS_RATE("dpbf16_512", f512, x = _mm512_dpbf16_ps(x, (__m512bh)a, (__m512bh)a))
#endif
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
  const __m256 f256 = _mm256_set1_ps(0.5f);
  const __m256i i256 = _mm256_set1_epi32(3), low256 = _mm256_set1_epi8(15);
  const __m256i even256 = _mm256_set1_epi16(255);
  SPECOPS_RATE("fma256", f256, x = _mm256_fmadd_ps(x, a, a))
  SPECOPS_RATE("max256", f256, x = _mm256_max_ps(x, a))
  SPECOPS_RATE(
      "widen256", i256, x = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(x)), 16))
  SPECOPS_RATE("widen_fp8_256", i256, {
    __m128i words = _mm_cvtepi8_epi16(_mm256_castsi256_si128(x));
    words = _mm_and_si128(_mm_slli_epi16(words, 7), _mm_set1_epi16(-0x4080));
    x = _mm256_castps_si256(_mm256_cvtph_ps(words));
  })
  SPECOPS_RATE("split256", i256, {
    __m256i odd = _mm256_srli_epi16(x, 8);
    keep(odd);
    x = _mm256_and_si256(x, even256);
  })
  SPECOPS_RATE("halves256", i256, {
    __m256i high = _mm256_and_si256(_mm256_srli_epi16(x, 4), low256);
    keep(high);
    x = _mm256_and_si256(x, low256);
  })
  SPECOPS_RATE("madd256", i256, x = _mm256_add_epi32(x, _mm256_madd_epi16(x, a)))
  SPECOPS_RATE("maddubs256", i256, x = _mm256_add_epi16(x, _mm256_maddubs_epi16(x, a)))
#endif
#if defined(__AVXVNNI__)
  SPECOPS_RATE("dpwssd256", i256, x = _mm256_dpwssd_avx_epi32(x, a, a))
  SPECOPS_RATE("dpbusd256", i256, x = _mm256_dpbusd_avx_epi32(x, a, a))
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
