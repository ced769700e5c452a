// SPDX-License-Identifier: Apache-2.0
// The interpreter's machine, as the built-ins see it: threads that run one at a time, and the
// meeting points where they wait for each other. Blocks run one after another on one host thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "simt/types.h"

namespace specops::simt {

using Site = std::source_location;

constexpr int kLanes = 32;
constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kLanes;
constexpr size_t kMaxSharedBytes = 227 << 10;

// Which thread, and which block, goes on when several can.
enum class Schedule { kInOrder, kReverse, kWarpAtATime, kLastWarpFirst, kRandom };
// When the bytes of a cp.async arrive: as late as the wait allows, at once, or in between.
enum class Landing { kLate, kEarly, kRandom };
// The rounding rule of mma: fused multiply-adds in order of k; Hopper's one truncated sum of all
// products and the addend, 25 fractional bits; Ampere's two of eight products, 24 bits.
enum class Accumulation { kFma, kHopper, kAmpere };

struct Settings {
  Schedule schedule = Schedule::kInOrder;
  uint64_t seed = 0;
  Landing landing = Landing::kLate;
  Accumulation accumulation = Accumulation::kFma;
  uint64_t fuzz = 0;  // not 0: approximate functions are off by up to 2 units in the last place
  bool bank_conflicts = false;  // note the worst bank conflict of ldmatrix
  int num_sms = 4;
  int max_shared_bytes = kMaxSharedBytes;  // of a block; at most that
};

// Since the last reset.
struct Counters {
  int64_t launches = 0;
  int64_t blocks = 0;
  int64_t barriers = 0;     // __syncthreads completed
  int64_t collectives = 0;  // warp collectives completed, mma among them
  int64_t mmas = 0;
  int64_t copied_bytes = 0;  // by cp.async, from global memory
  int64_t switches = 0;
  int64_t bank_conflict = 0;  // worst number of passes an 8-row read of ldmatrix took
  std::string bank_conflict_site;
};

extern Settings settings;
extern Counters counters;

inline int num_sms() { return settings.num_sms; }

// Starts every thread of every block on `body(context)`. Throws std::runtime_error with a sentence
// when the kernel does something it must not.
void run_blocks(dim3 grid,
                dim3 block,
                size_t smem_bytes,
                const char* kernel,
                void (*body)(const void*),
                const void* context);

// A kernel as the messages call it, after the types of its parameters.
std::string demangled(const char* name);
template <typename... Params>
const char* kernel_name() {
  static const std::string name = "kernel" + demangled(typeid(void(Params...)).name()).substr(5);
  return name.c_str();
}

template <typename Body>
void run(dim3 grid, dim3 block, size_t smem_bytes, const char* kernel, const Body& body) {
  run_blocks(
      grid,
      block,
      smem_bytes,
      kernel,
      [](const void* context) { (*static_cast<const Body*>(context))(); },
      &body);
}

unsigned char* shared_memory();

// Ends the launch with "<kernel>, block (x, y, z), thread (x, y, z): <what> (file:line)".
[[noreturn]] void fail(const std::string& what, const Site& site);

// The same with the place as text.
[[noreturn]] void fail_at(const std::string& what, const std::string& place);

// The thread that runs, as a number in its block; -1 while the host does.
extern int current_thread;

// A warp collective: what its lanes agree on, and what the last to arrive does for all of them.
struct Collective {
  const char* name;
  void (*complete)(void* const* operands, uint32_t mask);  // operands[lane], of lanes in the mask
  bool orders_memory = false;                              // CUDA promises it of __syncwarp alone
};

// Waits until every lane of the mask is in the same collective at the same place.
void collective(const Collective& what, uint32_t mask, void* operands, const Site& site);

enum class Vote { kNone, kOr, kAnd, kCount };

// Waits for all threads of the block; returns the vote on `predicate`.
int block_barrier(Vote vote, bool predicate, const Site& site);

// Named barriers: `threads` arrivals complete one; only `wait`ing threads stop.
void named_barrier(int id, int threads, bool wait, const Site& site);

// cp.async.
void copy_async(void* smem, const void* global, bool valid, const Site& site);
void commit_async();
void wait_async(int newest_groups);

// What a plain access through a helper must satisfy.
void check_aligned(const void* pointer, size_t bytes, const char* what, const Site& site);
void check_shared(const void* pointer, size_t bytes, const char* what, const Site& site);

// An approximate function's result: as given, or off by up to two units when fuzz is on. The same
// for the same argument, as in hardware.
float approximate(float exact, float argument);

// How often the clocks have been read in this launch, this time included.
constexpr int64_t kTimerStepNs = 64;
constexpr int64_t kClockStep = 100;
int64_t next_tick();

// Told to the race detector; nothing in other builds. `thread`: -1 is the one that runs.
#if defined(SPECOPS_SIMT_RACE)
void on_read(const void* pointer, size_t bytes, const Site& site, int thread = -1);
void on_write(const void* pointer, size_t bytes, const Site& site);
void on_atomic(const void* pointer, size_t bytes, const Site& site);
void on_fence();
#else
inline void on_read(const void*, size_t, const Site&, int = -1) {}
inline void on_write(const void*, size_t, const Site&) {}
inline void on_atomic(const void*, size_t, const Site&) {}
inline void on_fence() {}
#endif

// The global memory kernels may touch, as [first, end); empty: any. Race builds only.
void set_regions(std::vector<std::pair<uintptr_t, uintptr_t>> regions);

}  // namespace specops::simt
