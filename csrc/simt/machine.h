// SPDX-License-Identifier: Apache-2.0
// The machine of the interpreter, as the built-ins use it: threads of a block that run one at a
// time, and the points at which they wait for each other. Blocks run one after another on one host
// thread.
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

// The order in which ready threads run, and in which blocks run.
enum class Schedule { kInOrder, kReverse, kWarpAtATime, kLastWarpFirst, kRandom };
// When the bytes of a cp.async arrive: as late as the wait allows, at once, or randomly in between.
enum class Landing { kLate, kEarly, kRandom };
// Rounding rule of mma. kFma: fused multiply-adds in order of k. kHopper: one truncated sum of all
// products and the addend, with 25 fractional bits. kAmpere: two such sums, of eight products each,
// with 24 bits.
enum class Accumulation { kFma, kHopper, kAmpere };

struct Settings {
  Schedule schedule = Schedule::kInOrder;
  uint64_t seed = 0;
  Landing landing = Landing::kLate;
  Accumulation accumulation = Accumulation::kFma;
  uint64_t fuzz = 0;            // if not 0, approximate functions are off by up to 2 ulp
  bool bank_conflicts = false;  // record the worst bank conflict of ldmatrix
  int num_sms = 4;
  int max_shared_bytes = kMaxSharedBytes;  // per block; at most kMaxSharedBytes
};

// Counters since the last reset; tests read them.
struct Counters {
  int64_t launches = 0;
  int64_t blocks = 0;
  int64_t barriers = 0;     // completed calls of __syncthreads
  int64_t collectives = 0;  // completed warp collectives, including mma
  int64_t mmas = 0;
  int64_t copied_bytes = 0;  // by cp.async, from global memory
  int64_t switches = 0;
  int64_t bank_conflict = 0;  // most passes that an 8-row read of ldmatrix took
  std::string bank_conflict_site;
};

extern Settings settings;
extern Counters counters;

inline int num_sms() { return settings.num_sms; }

// Runs `body(context)` in every thread of every block. Throws std::runtime_error with a description
// if the kernel does something that CUDA forbids.
void run_blocks(dim3 grid,
                dim3 block,
                size_t smem_bytes,
                const char* kernel,
                void (*body)(const void*),
                const void* context);

// Returns the name of a kernel for messages, derived from its parameter types.
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

// Ends the current thread.
[[noreturn]] void exit_thread();

// Ends the launch with the error "<kernel>, block (x, y, z), thread (x, y, z): <what> (file:line)".
[[noreturn]] void fail(const std::string& what, const Site& site);

// Does the same as fail(), but the place is passed as text.
[[noreturn]] void fail_at(const std::string& what, const std::string& place);

// Index of the running thread in its block; -1 while host code runs.
extern int current_thread;

// A warp collective: its identity, which must be the same in all lanes, and the function that the
// last lane to arrive runs for all lanes.
struct Collective {
  const char* name;
  void (*complete)(void* const* operands, uint32_t mask);  // operands[lane] for lanes in the mask
  bool orders_memory = false;                              // in CUDA, only __syncwarp does
};

// Waits until every lane of the mask is in the same collective at the same place.
void collective(const Collective& what, uint32_t mask, void* operands, const Site& site);

enum class Vote { kNone, kOr, kAnd, kCount };

// Waits until all threads of the block have arrived, and returns the vote on `predicate`.
int block_barrier(Vote vote, bool predicate, const Site& site);

// Arrives at a named barrier, which `threads` arrivals complete. If `wait`, blocks until then.
void named_barrier(int id, int threads, bool wait, const Site& site);

// Implementations of cp.async.
void copy_async(void* smem, const void* global, bool valid, const Site& site);
void commit_async();
void wait_async(int newest_groups);

// Checks of ordinary memory accesses that go through helpers.
void check_aligned(const void* pointer, size_t bytes, const char* what, const Site& site);
void check_shared(const void* pointer, size_t bytes, const char* what, const Site& site);

// Returns the result of an approximate function: exact, or off by up to two units in the last place
// if fuzz is enabled. Equal arguments give equal results, as in hardware.
float approximate(float exact, float argument);

// next_tick() returns how often clocks have been read in this launch, including this read.
constexpr int64_t kTimerStepNs = 64;
constexpr int64_t kClockStep = 100;
int64_t next_tick();

// Events for the race detector; they do nothing in other builds. `thread`: -1 is the running
// thread.
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

// Sets the ranges [first, end) of global memory that kernels may access; empty: any. Used in race
// builds only.
void set_regions(std::vector<std::pair<uintptr_t, uintptr_t>> regions);

}  // namespace specops::simt
