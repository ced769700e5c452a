// SPDX-License-Identifier: Apache-2.0
// The machine of the interpreter: fibers as threads, the scheduler, synchronization, shared memory
// and cp.async.
#include "simt/simt.h"

#include <cxxabi.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "simt/detector.h"
#include "simt/fiber.h"
#include "simt/traps.h"

uint3 threadIdx;
uint3 blockIdx;
dim3 blockDim;
dim3 gridDim;

namespace specops::simt {

Settings settings;
Counters counters;
int current_thread = -1;

namespace {

constexpr size_t kStackBytes =
    256 << 10;  // address space per thread, of which only a few pages are used
constexpr size_t kPageBytes = 4 << 10;
constexpr int kNumBarriers = 16;
int64_t ticks = 0;                        // number of clock reads in this launch
constexpr uint32_t kPoison = 0x7fa17fa1;  // a signaling NaN in fp32, bf16 and fp16

enum class Wait : uint8_t { kNothing, kBarrier, kCollective };

struct AsyncCopy {
  unsigned char* to;
  const void* from;  // nullptr: zeros
  bool landed;
  Site site;
};

struct Thread {
  Fiber fiber;
  uint3 index;
  int number;
  Wait wait;
  bool exited;
  int barrier;             // barrier at which the thread waits
  const Collective* what;  // collective in which the thread waits
  uint32_t mask;
  void* operands;
  Site site;
  std::vector<AsyncCopy>
      copies;                  // not landed yet; copies before groups.back() are in closed groups
  std::vector<size_t> groups;  // end of each closed group, as an index into copies
};

struct Barrier {
  int arrived;
  int expected;
  int votes;
  int result;
  Vote vote;
  Site site;
  uint32_t waiting[kMaxWarps];
};

class Machine {
 public:
  void run(dim3 grid,
           dim3 block,
           size_t smem_bytes,
           const char* kernel,
           void (*body)(const void*),
           const void* context);

  [[noreturn]] void fail(const std::string& what, const std::string& place);
  [[noreturn]] void exit_thread();
  void enter(const Collective& what, uint32_t mask, void* operands, const Site& site);
  int arrive_block(Vote vote, bool predicate, const Site& site);
  void arrive_named(int id, int threads, bool wait, const Site& site);
  void copy(void* smem, const void* global, bool valid, const Site& site);
  void commit();
  void land(size_t newest_groups);
  unsigned char* arena() { return arena_; }
  [[maybe_unused]] void note(
      const char* report);  // text of AddressSanitizer, which does not stop the program
  std::string describe_fault(uintptr_t address) const;
  std::string last_place() const;
  bool in_arena(const void* pointer, size_t bytes) const {
    auto* first = static_cast<const unsigned char*>(pointer);
    return first >= arena_ && first + bytes <= arena_ + smem_bytes_;
  }

 private:
  static void entry();
  void prepare(int threads, size_t smem_bytes);
  void run_block();
  [[noreturn]] void back_to_host();
  void leave();  // the current thread must wait: continue with another one
  void yield();  // the current thread is ready, but others may run first
  void resume(int number);
  int next() const;
  bool ready_at(int number) const { return (ready_[number / kLanes] >> number % kLanes & 1) != 0; }
  void stop(int number) {
    int warp = number / kLanes;
    ready_[warp] &= ~(1u << number % kLanes);
    if (ready_[warp] == 0) ready_warps_ &= ~(1u << warp);
  }
  void release(int warp, uint32_t lanes) {
    ready_[warp] |= lanes;
    if (lanes != 0) ready_warps_ |= 1u << warp;
  }
  void complete(int id, bool passes);
  std::string deadlock() const;
  std::string name(int number) const;
  uint64_t random() const {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return random_;
  }

  // State of the launch.
  const char* kernel_ = "";
  void (*body_)(const void*) = nullptr;
  const void* context_ = nullptr;
  int num_threads_ = 0;
  size_t smem_bytes_ = 0;
  bool failed_ = false;
  std::string error_;

  // State of the block.
  unsigned char* arena_ = nullptr;
  int current_ = -1;
  int exited_ = 0;
  uint32_t ready_[kMaxWarps] = {};    // lanes that are ready
  uint32_t ready_warps_ = 0;          // warps with a ready lane
  uint32_t meeting_[kMaxWarps] = {};  // lanes that wait in a collective
  uint32_t present_[kMaxWarps] = {};  // lanes that have not exited
  void* operands_[kMaxWarps][kLanes] = {};
  Barrier barriers_[kNumBarriers] = {};
  std::vector<Thread> threads_;
  Fiber main_;
  mutable uint64_t random_ = 1;

  // State kept between launches.
  unsigned char* arena_end_ = nullptr;
  unsigned char* stacks_ = nullptr;
};

Machine machine;

unsigned char* map(size_t bytes) {
  void* memory = mmap(
      nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("simt: no memory for the machine");
  return static_cast<unsigned char*>(memory);
}

void protect(unsigned char* page) { mprotect(page, kPageBytes, PROT_NONE); }

std::string triple(unsigned x, unsigned y, unsigned z) {
  return "(" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ")";
}

std::string place(const Site& site) {
  std::string path = site.file_name();
  return path.substr(path.rfind('/') + 1) + ":" + std::to_string(site.line());
}

bool same(const Site& a, const Site& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || std::strcmp(a.file_name(), b.file_name()) == 0);
}

std::string hex(uint32_t mask) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", mask);
  return text;
}

void Machine::prepare(int threads, size_t smem_bytes) {
  if (arena_end_ == nullptr) {
    size_t bytes = (kMaxSharedBytes / kPageBytes + 1) * kPageBytes;
    unsigned char* memory = map(bytes + 2 * kPageBytes);
    protect(memory);
    arena_end_ = memory + kPageBytes + bytes;
    protect(arena_end_);
    stacks_ = map(kMaxThreads * kStackBytes);
    for (int i = 0; i < kMaxThreads; ++i) protect(stacks_ + i * kStackBytes);
  }
  if (threads_.size() < static_cast<size_t>(threads)) {
    threads_.clear();
    threads_.resize(static_cast<size_t>(threads));
  }
  num_threads_ = threads;
  smem_bytes_ = smem_bytes;
  // The arena for shared memory ends at a protected page.
  arena_ = arena_end_ - (smem_bytes + 127) / 128 * 128;
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(arena_end_ - kMaxSharedBytes, kMaxSharedBytes);
  __asan_unpoison_memory_region(arena_, smem_bytes);
  __asan_set_error_report_callback([](const char* text) { machine.note(text); });
#endif
}

void Machine::run(dim3 grid,
                  dim3 block,
                  size_t smem_bytes,
                  const char* kernel,
                  void (*body)(const void*),
                  const void* context) {
  kernel_ = kernel;
  body_ = body;
  context_ = context;
  auto refuse = [&](const std::string& what) {
    throw std::runtime_error(std::string(kernel) + ": " + what);
  };
  uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > kMaxThreads || block.z > 64) {
    refuse("a block must have 1 to 1024 threads, got " + triple(block.x, block.y, block.z));
  }
  if (grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 || grid.y > 65535 || grid.z == 0 ||
      grid.z > 65535) {
    refuse("a grid must have 1 to 2^31 - 1, 65535 and 65535 blocks, got " +
           triple(grid.x, grid.y, grid.z));
  }
  if (smem_bytes > static_cast<size_t>(settings.max_shared_bytes)) {
    refuse("a block has at most " + std::to_string(settings.max_shared_bytes) +
           " bytes of shared memory, got " + std::to_string(smem_bytes));
  }
  prepare(static_cast<int>(threads), smem_bytes);
  FaultGuard guard;
  detector::begin_launch(num_threads_, stacks_, kMaxThreads * kStackBytes, arena_end_);
  failed_ = false;
  random_ = settings.seed * 0x9e3779b97f4a7c15u + 0x1234567u;
  if (random_ == 0) random_ = 1;
  gridDim = grid;
  blockDim = block;
  ticks = 0;
  ++counters.launches;

  int64_t blocks = int64_t{grid.x} * grid.y * grid.z;
  std::vector<int64_t> shuffled;
  if (settings.schedule == Schedule::kRandom) {
    shuffled.resize(static_cast<size_t>(blocks));
    std::iota(shuffled.begin(), shuffled.end(), 0);
    for (size_t i = shuffled.size(); i > 1; --i) std::swap(shuffled[i - 1], shuffled[random() % i]);
  }
  bool backwards =
      settings.schedule == Schedule::kReverse || settings.schedule == Schedule::kLastWarpFirst;
  for (int64_t i = 0; i < blocks && !failed_; ++i) {
    int64_t number = !shuffled.empty() ? shuffled[static_cast<size_t>(i)]
                     : backwards       ? blocks - 1 - i
                                       : i;
    blockIdx = {static_cast<unsigned>(number % grid.x),
                static_cast<unsigned>(number / grid.x % grid.y),
                static_cast<unsigned>(number / grid.x / grid.y)};
    run_block();
  }
  if (failed_) throw std::runtime_error(error_);
}

void Machine::run_block() {
  ++counters.blocks;
  for (size_t i = 0; i < smem_bytes_; i += sizeof kPoison) {
    std::memcpy(arena_ + i, &kPoison, std::min(sizeof kPoison, smem_bytes_ - i));
  }
  detector::begin_block(arena_, smem_bytes_);
  exited_ = 0;
  for (Barrier& barrier : barriers_) barrier = {};
  uint3 index{0, 0, 0};
  for (int i = 0; i < num_threads_; ++i) {
    Thread& thread = threads_[static_cast<size_t>(i)];
    thread.number = i;
    thread.index = index;
    thread.wait = Wait::kNothing;
    thread.exited = false;
    thread.site = {};
    thread.copies.clear();
    thread.groups.clear();
    size_t color = static_cast<size_t>(i % 31) * 192;
    thread.fiber.start(stacks_ + static_cast<size_t>(i) * kStackBytes + kPageBytes,
                       kStackBytes - kPageBytes,
                       color,
                       entry);
    if (++index.x == blockDim.x) {
      index.x = 0;
      if (++index.y == blockDim.y) {
        index.y = 0;
        ++index.z;
      }
    }
  }
  ready_warps_ = 0;
  for (int warp = 0; warp * kLanes < num_threads_; ++warp) {
    int lanes = std::min(num_threads_ - warp * kLanes, kLanes);
    uint32_t all = lanes == kLanes ? ~0u : (1u << lanes) - 1;
    present_[warp] = all;
    meeting_[warp] = 0;
    ready_[warp] = 0;
    release(warp, all);
  }
  current_ = num_threads_ - 1;  // so that, in order, thread 0 comes next
  if (settings.schedule == Schedule::kReverse) current_ = 0;
  int first = next();
  current_ = current_thread = first;
  Thread& thread = threads_[static_cast<size_t>(first)];
  threadIdx = thread.index;
  main_.switch_to(thread.fiber);
}

void Machine::entry() {
  Thread& self = machine.threads_[static_cast<size_t>(machine.current_)];
  self.fiber.arrived(&machine.main_);
  machine.body_(machine.context_);
  machine.exit_thread();
}

void Machine::exit_thread() {
  if (failed_) back_to_host();
  Thread& self = threads_[static_cast<size_t>(current_)];
  int warp = current_ / kLanes;
  uint32_t bit = 1u << current_ % kLanes;
  self.groups.push_back(self.copies.size());
  land(0);
  for (uint32_t rest = meeting_[warp]; rest != 0; rest &= rest - 1) {
    int lane = std::countr_zero(rest);
    const Thread& other = threads_[static_cast<size_t>(warp * kLanes + lane)];
    if ((other.mask & bit) != 0) {
      simt::fail(std::string("the thread has returned, while lane ") + std::to_string(lane) +
                     " of its warp waits for it in " + other.what->name + " with mask " +
                     hex(other.mask),
                 other.site);
    }
  }
  Barrier& all = barriers_[0];
  if (all.arrived > 0) {
    simt::fail("the thread has returned, while " + std::to_string(all.arrived) +
                   " threads wait for it at __syncthreads",
               all.site);
  }
  self.exited = true;
  ++exited_;
  present_[warp] &= ~bit;
  stop(current_);
  leave();
  __builtin_unreachable();
}

// Returns the ready thread to run next; -1 if there is none.
int Machine::next() const {
  if (ready_warps_ == 0) return -1;
  int warp = current_ / kLanes;
  int lane = current_ % kLanes;
  // Returns the first set lane after `from`, wrapping around.
  auto lane_after = [](uint32_t lanes, int from) {
    uint32_t above = from == kLanes - 1 ? 0 : lanes & ~0u << (from + 1);
    return std::countr_zero(above != 0 ? above : lanes);
  };
  auto warp_after = [&](int from) { return lane_after(ready_warps_, from); };
  switch (settings.schedule) {
    case Schedule::kInOrder: {
      uint32_t above = lane == kLanes - 1 ? 0 : ready_[warp] & ~0u << (lane + 1);
      if (above != 0) return warp * kLanes + std::countr_zero(above);
      int other = warp_after(warp);
      return other * kLanes + std::countr_zero(ready_[other]);
    }
    case Schedule::kReverse: {
      uint32_t below = ready_[warp] & ((1u << lane) - 1);
      if (below != 0) return warp * kLanes + 31 - std::countl_zero(below);
      uint32_t warps = ready_warps_ & ((1u << warp) - 1);
      int other = 31 - std::countl_zero(warps != 0 ? warps : ready_warps_);
      return other * kLanes + 31 - std::countl_zero(ready_[other]);
    }
    case Schedule::kWarpAtATime: {
      int other = ready_[warp] != 0 ? warp : warp_after(warp);
      int from = other == warp ? lane : kLanes - 1;
      return other * kLanes + lane_after(ready_[other], from);
    }
    case Schedule::kLastWarpFirst: {
      int other = 31 - std::countl_zero(ready_warps_);
      return other * kLanes + lane_after(ready_[other], other == warp ? lane : kLanes - 1);
    }
    case Schedule::kRandom: {
      uint64_t draw = random();
      int other = warp_after(static_cast<int>(draw & 31));
      return other * kLanes + lane_after(ready_[other], static_cast<int>(draw >> 5 & 31));
    }
  }
  return -1;
}

void Machine::resume(int number) {
  Thread& from = threads_[static_cast<size_t>(current_)];
  Thread& to = threads_[static_cast<size_t>(number)];
  current_ = current_thread = number;
  threadIdx = to.index;
  ++counters.switches;
  // Prefetch the stack that probably runs next, because the cache does not hold all of them.
  threads_[static_cast<size_t>(number + 1 < num_threads_ ? number + 1 : 0)].fiber.prefetch();
  from.fiber.switch_to(to.fiber);
}

void Machine::leave() {
  int number = next();
  if (number >= 0) {
    resume(number);
    return;
  }
  if (exited_ < num_threads_ && !failed_) {
    failed_ = true;
    error_ = deadlock();
  }
  back_to_host();
}

void Machine::yield() {
  int number = next();
  if (number != current_) resume(number);
}

void Machine::fail(const std::string& what, const std::string& place) {
  failed_ = true;
  error_ = name(current_) + ": " + what + " (" + place + ")";
  back_to_host();
}

void Machine::back_to_host() {
  Fiber& from = threads_[static_cast<size_t>(current_)].fiber;
  current_thread = -1;
  from.switch_to(main_);
  __builtin_unreachable();
}

std::string Machine::name(int number) const {
  const uint3& index = threads_[static_cast<size_t>(number)].index;
  return std::string(kernel_) + ", block " + triple(blockIdx.x, blockIdx.y, blockIdx.z) +
         ", thread " + triple(index.x, index.y, index.z);
}

void Machine::note(const char* report) {
  if (failed_ || current_thread < 0) return;
  failed_ = true;
  std::string text = report;
  // "==1==ERROR: AddressSanitizer: <what> on address ... at pc ...", then the stack of the access.
  auto after = [&](const char* mark, size_t from) {
    size_t found = text.find(mark, from);
    return found == std::string::npos ? from : found + std::strlen(mark);
  };
  size_t what = after("AddressSanitizer: ", 0);
  size_t access = after("\n", what);
  size_t frame = after("#0 ", access);
  error_ = name(current_) + ": " + text.substr(what, text.find(" at pc", what) - what) + ", " +
           text.substr(access, text.find(" at ", access) - access) + " (" +
           text.substr(frame, text.find('\n', frame) - frame) + ")";
}

std::string Machine::describe_fault(uintptr_t address) const {
  auto arena_end = reinterpret_cast<uintptr_t>(arena_end_);
  if (address >= arena_end && address < arena_end + kPageBytes) {
    return "touches byte " + std::to_string(address - reinterpret_cast<uintptr_t>(arena_)) +
           " of a shared memory of " + std::to_string(smem_bytes_) + " bytes,";
  }
  uintptr_t stack =
      reinterpret_cast<uintptr_t>(stacks_) + static_cast<uintptr_t>(current_) * kStackBytes;
  if (address >= stack && address < stack + kPageBytes) return "the stack has run over";
  return "touches memory that is not there,";
}

std::string Machine::last_place() const {
  const Site& site = threads_[static_cast<size_t>(current_)].site;
  return site.line() == 0 ? "the start" : place(site);
}

// Returns a message that lists where all threads wait; threads at the same place are grouped.
std::string Machine::deadlock() const {
  std::vector<std::pair<std::string, std::vector<int>>> places;
  for (int i = 0; i < num_threads_; ++i) {
    const Thread& thread = threads_[static_cast<size_t>(i)];
    std::string where;
    if (thread.exited) {
      where = "returned";
    } else if (thread.wait == Wait::kBarrier) {
      const Barrier& barrier = barriers_[thread.barrier];
      where = thread.barrier == 0 ? "wait at __syncthreads"
                                  : "wait at barrier " + std::to_string(thread.barrier) + " (" +
                                        std::to_string(barrier.arrived) + " of " +
                                        std::to_string(barrier.expected) + " threads arrived)";
      where += " (" + place(thread.site) + ")";
    } else {
      where = std::string("wait in ") + thread.what->name + " with mask " + hex(thread.mask) +
              " (" + place(thread.site) + ")";
    }
    auto found = std::find_if(
        places.begin(), places.end(), [&](const auto& entry) { return entry.first == where; });
    if (found == places.end()) {
      places.push_back({where, {i}});
    } else {
      found->second.push_back(i);
    }
  }
  std::string text = std::string(kernel_) + ", block " +
                     triple(blockIdx.x, blockIdx.y, blockIdx.z) + ": deadlock:";
  const char* separator = " ";
  for (const auto& [where, numbers] : places) {
    text += separator;
    text += numbers.size() == 1 ? "thread " : "threads ";
    for (size_t i = 0; i < numbers.size();) {
      size_t last = i;
      while (last + 1 < numbers.size() && numbers[last + 1] == numbers[last] + 1) ++last;
      if (i > 0) text += ", ";
      text += std::to_string(numbers[i]);
      if (last > i) text += "-" + std::to_string(numbers[last]);
      i = last + 1;
    }
    text += " " + where;
    separator = "; ";
  }
  return text;
}

void Machine::enter(const Collective& what, uint32_t mask, void* operands, const Site& site) {
  Thread& self = threads_[static_cast<size_t>(current_)];
  int warp = current_ / kLanes;
  int lane = current_ % kLanes;
  uint32_t bit = 1u << lane;
  self.site = site;
  if ((mask & bit) == 0) {
    simt::fail(std::string(what.name) + " with mask " + hex(mask) + ", which leaves its own lane " +
                   std::to_string(lane) + " out",
               site);
  }
  if ((mask & ~present_[warp]) != 0) {
    simt::fail(std::string(what.name) + " with mask " + hex(mask) + ", but lane " +
                   std::to_string(std::countr_zero(mask & ~present_[warp])) +
                   " has returned or is outside the block",
               site);
  }
  // Every lane that waits for this one must wait at the same place.
  for (uint32_t rest = meeting_[warp] & mask; rest != 0; rest &= rest - 1) {
    int other_lane = std::countr_zero(rest);
    const Thread& other = threads_[static_cast<size_t>(warp * kLanes + other_lane)];
    if (other.what == &what && other.mask == mask && same(other.site, site)) break;
    if ((other.mask & bit) == 0) continue;
    simt::fail(std::string(what.name) + " with mask " + hex(mask) + " meets lane " +
                   std::to_string(other_lane) + " in " + other.what->name + " with mask " +
                   hex(other.mask) + " at " + place(other.site),
               site);
  }
  operands_[warp][lane] = operands;
  uint32_t others = mask & ~bit;
  if ((meeting_[warp] & others) != others) {
    self.wait = Wait::kCollective;
    self.what = &what;
    self.mask = mask;
    meeting_[warp] |= bit;
    stop(current_);
    leave();
    self.wait = Wait::kNothing;
    return;
  }
  for (uint32_t rest = others; rest != 0; rest &= rest - 1) {
    int other_lane = std::countr_zero(rest);
    const Thread& other = threads_[static_cast<size_t>(warp * kLanes + other_lane)];
    if (other.what == &what && other.mask == mask && same(other.site, site)) continue;
    simt::fail(std::string(what.name) + " with mask " + hex(mask) + " meets lane " +
                   std::to_string(other_lane) + " in " + other.what->name + " with mask " +
                   hex(other.mask) + " at " + place(other.site),
               site);
  }
  ++counters.collectives;
  what.complete(operands_[warp], mask);
  if (what.orders_memory) detector::sync_lanes(warp, mask);
  meeting_[warp] &= ~mask;
  release(warp, others);
  yield();
}

// Completes a barrier at which the current thread has arrived last. `passes`: the current thread
// also waits there.
void Machine::complete(int id, bool passes) {
  Barrier& barrier = barriers_[id];
  switch (barrier.vote) {
    case Vote::kNone:
      break;
    case Vote::kOr:
      barrier.result = barrier.votes > 0;
      break;
    case Vote::kAnd:
      barrier.result = barrier.votes == barrier.arrived;
      break;
    case Vote::kCount:
      barrier.result = barrier.votes;
      break;
  }
  barrier.arrived = 0;
  barrier.votes = 0;
  for (int warp = 0; warp * kLanes < num_threads_; ++warp) {
    uint32_t lanes = barrier.waiting[warp];
    release(warp, lanes);
#if defined(SPECOPS_SIMT_RACE)
    for (uint32_t rest = lanes; rest != 0; rest &= rest - 1) {
      detector::pass(id, warp * kLanes + std::countr_zero(rest));
    }
#endif
    barrier.waiting[warp] = 0;
  }
  if (passes) detector::pass(id, current_);
  detector::reset(id);
}

int Machine::arrive_block(Vote vote, bool predicate, const Site& site) {
  Thread& self = threads_[static_cast<size_t>(current_)];
  self.site = site;
  Barrier& barrier = barriers_[0];
  if (exited_ > 0) {
    simt::fail(
        "__syncthreads, but " + std::to_string(exited_) + " threads of the block have returned",
        site);
  }
  if (barrier.arrived == 0) {
    barrier.site = site;
    barrier.vote = vote;
  } else if (barrier.vote != vote || !same(barrier.site, site)) {
    simt::fail(
        "__syncthreads meets threads that wait at another __syncthreads, at " + place(barrier.site),
        site);
  }
  barrier.votes += predicate;
  detector::arrive(0, current_);
  if (++barrier.arrived == num_threads_) {
    ++counters.barriers;
    complete(0, true);
    yield();
    return barrier.result;
  }
  barrier.waiting[current_ / kLanes] |= 1u << current_ % kLanes;
  self.wait = Wait::kBarrier;
  self.barrier = 0;
  stop(current_);
  leave();
  self.wait = Wait::kNothing;
  return barrier.result;
}

void Machine::arrive_named(int id, int threads, bool wait, const Site& site) {
  Thread& self = threads_[static_cast<size_t>(current_)];
  if (id < 1 || id >= kNumBarriers) {
    simt::fail("a named barrier is 1 to 15, got " + std::to_string(id), site);
  }
  if (threads < kLanes || threads % kLanes != 0 || threads > (num_threads_ + 31) / 32 * 32) {
    simt::fail("a named barrier takes a multiple of 32 threads up to the block's " +
                   std::to_string(num_threads_) + ", got " + std::to_string(threads),
               site);
  }
  self.site = site;
  Barrier& barrier = barriers_[id];
  if (barrier.arrived == 0) {
    barrier.expected = threads;
    barrier.site = site;
  } else if (barrier.expected != threads) {
    simt::fail("barrier " + std::to_string(id) + " of " + std::to_string(threads) +
                   " threads meets threads that wait for " + std::to_string(barrier.expected) +
                   " at " + place(barrier.site),
               site);
  }
  detector::arrive(id, current_);
  if (++barrier.arrived == barrier.expected) {
    complete(id, wait);
    yield();
    return;
  }
  if (!wait) return;
  barrier.waiting[current_ / kLanes] |= 1u << current_ % kLanes;
  self.wait = Wait::kBarrier;
  self.barrier = id;
  stop(current_);
  leave();
  self.wait = Wait::kNothing;
}

void land_one(AsyncCopy& copy) {
  if (copy.landed) return;
  if (copy.from == nullptr) {
    std::memset(copy.to, 0, 16);
  } else {
    std::memcpy(copy.to, copy.from, 16);
  }
  copy.landed = true;
}

void Machine::copy(void* smem, const void* global, bool valid, const Site& site) {
  Thread& self = threads_[static_cast<size_t>(current_)];
  check_aligned(smem, 16, "the target of a cp.async", site);
  if (valid) check_aligned(global, 16, "the source of a cp.async", site);
  check_shared(smem, 16, "cp.async", site);
  self.site = site;
  if (valid) on_read(global, 16, site);
  detector::issue(smem, site);
  auto* to = static_cast<unsigned char*>(smem);
  for (int i = 0; i < 16; i += 4) std::memcpy(to + i, &kPoison, sizeof kPoison);
  self.copies.push_back({to, valid ? global : nullptr, false, site});
  bool at_once = settings.landing == Landing::kEarly ||
                 (settings.landing == Landing::kRandom && (random() & 1) != 0);
  if (at_once) land_one(self.copies.back());
}

void Machine::commit() {
  Thread& self = threads_[static_cast<size_t>(current_)];
  self.groups.push_back(self.copies.size());
}

void Machine::land(size_t newest_groups) {
  Thread& self = threads_[static_cast<size_t>(current_)];
  if (self.groups.size() <= newest_groups) return;
  size_t closed = self.groups.size() - newest_groups;
  size_t end = self.groups[closed - 1];
  for (size_t i = 0; i < end; ++i) {
    land_one(self.copies[i]);
    detector::land(self.copies[i].to, self.copies[i].site);
  }
  // With random landing, newer copies may also have arrived.
  if (settings.landing == Landing::kRandom) {
    for (size_t i = end; i < self.copies.size(); ++i) {
      if ((random() & 3) == 0) land_one(self.copies[i]);
    }
  }
  self.copies.erase(self.copies.begin(), self.copies.begin() + static_cast<std::ptrdiff_t>(end));
  self.groups.erase(self.groups.begin(), self.groups.begin() + static_cast<std::ptrdiff_t>(closed));
  for (size_t& group : self.groups) group -= end;
}

}  // namespace

std::string demangled(const char* name) {
  int status = 0;
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::string out = text == nullptr ? name : text;
  std::free(text);
  return out;
}

void run_blocks(dim3 grid,
                dim3 block,
                size_t smem_bytes,
                const char* kernel,
                void (*body)(const void*),
                const void* context) {
  static std::mutex one_at_a_time;
  std::lock_guard lock(one_at_a_time);
  machine.run(grid, block, smem_bytes, kernel, body, context);
}

unsigned char* shared_memory() { return machine.arena(); }

void exit_thread() { machine.exit_thread(); }

void fail(const std::string& what, const Site& site) { machine.fail(what, place(site)); }

void fail_at(const std::string& what, const std::string& place) { machine.fail(what, place); }

#if !defined(SPECOPS_SIMT_RACE)
void set_regions(std::vector<std::pair<uintptr_t, uintptr_t>>) {}
#endif

std::string describe_fault(uintptr_t address) { return machine.describe_fault(address); }

std::string last_place() { return machine.last_place(); }

void collective(const Collective& what, uint32_t mask, void* operands, const Site& site) {
  machine.enter(what, mask, operands, site);
}

int block_barrier(Vote vote, bool predicate, const Site& site) {
  return machine.arrive_block(vote, predicate, site);
}

void named_barrier(int id, int threads, bool wait, const Site& site) {
  machine.arrive_named(id, threads, wait, site);
}

void copy_async(void* smem, const void* global, bool valid, const Site& site) {
  if (valid) counters.copied_bytes += 16;
  machine.copy(smem, global, valid, site);
}

void commit_async() { machine.commit(); }

void wait_async(int newest_groups) { machine.land(static_cast<size_t>(newest_groups)); }

void check_aligned(const void* pointer, size_t bytes, const char* what, const Site& site) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes == 0) return;
  fail(std::string(what) + " must be aligned to " + std::to_string(bytes) + " bytes", site);
}

void check_shared(const void* pointer, size_t bytes, const char* what, const Site& site) {
  if (machine.in_arena(pointer, bytes)) return;
  fail(std::string(what) + " of an address outside the shared memory of the block", site);
}

int64_t next_tick() { return ++ticks; }

float approximate(float exact, float argument) {
  if (settings.fuzz == 0 || exact == 1.0f || !std::isnormal(exact)) return exact;
  uint64_t mixed = (std::bit_cast<uint32_t>(argument) + settings.fuzz) * 0x9e3779b97f4a7c15u;
  mixed ^= mixed >> 29;
  mixed *= 0xbf58476d1ce4e5b9u;
  auto offset = static_cast<int32_t>(mixed >> 32 & 0xffff) % 5 - 2;
  return std::bit_cast<float>(std::bit_cast<int32_t>(exact) + offset);
}

void complete_nothing(void* const*, uint32_t) {}

void complete_ballot(void* const* operands, uint32_t mask) {
  uint32_t result = 0;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    int lane = std::countr_zero(rest);
    if (static_cast<BallotOperands*>(operands[lane])->value) result |= 1u << lane;
  }
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    static_cast<BallotOperands*>(operands[std::countr_zero(rest)])->result = result;
  }
}

void complete_match(void* const* operands, uint32_t mask) {
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    auto& own = *static_cast<MatchOperands*>(operands[std::countr_zero(rest)]);
    own.result = 0;
    for (uint32_t all = mask; all != 0; all &= all - 1) {
      int lane = std::countr_zero(all);
      if (static_cast<MatchOperands*>(operands[lane])->value == own.value) own.result |= 1u << lane;
    }
  }
}

}  // namespace specops::simt
