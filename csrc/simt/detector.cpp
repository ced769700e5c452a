// SPDX-License-Identifier: Apache-2.0
// Race detector. Kernel files are compiled with -fsanitize=thread, and this file defines the hooks
// that this option calls at every memory access. Each thread has a vector clock; only
// synchronization merges the clocks of threads. For every byte, the detector stores the last write
// and a few reads. Of two accesses of which at least one is a write, the clocks must order one
// before the other. It does not matter whether this run executed them in a harmless order.
#if defined(SPECOPS_SIMT_RACE)

#include "simt/detector.h"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "simt/simt.h"

namespace specops::simt {
namespace {

constexpr int kBarriers = 16;
constexpr int kReads = 3;  // reads stored per byte; more matter only if all are unordered
constexpr size_t kPage = 4096;
constexpr uint32_t kSitePlace = 0x80000000u;

enum : uint16_t { kAtomic = 1, kInFlight = 2 };

// An access: block and thread, the clock of the thread, and the source line.
struct Epoch {
  uint32_t block = 0;  // counted over all launches; 0: no access
  uint32_t clock = 0;
  uint32_t place = 0;  // address in the module, or kSitePlace | index into `sites`
  uint16_t thread = 0;
  uint16_t flags = 0;
};

struct Cell {
  Epoch write;
  Epoch reads[kReads];
};

// Clocks that blocks have published with an atomic on one address, in order of arrival.
struct Meeting {
  std::unordered_map<uint32_t, size_t> position;  // index of a block in `published`
  std::vector<std::vector<uint32_t>> published;   // per thread of the block: the published clock
};

struct Detector {
  int threads = 0;
  uint32_t block = 0;
  uint32_t first_block = 1;  // first block of this launch
  std::vector<uint32_t>
      clocks;  // [threads][threads]: the clock of each thread, as each thread has seen it
  std::vector<uint32_t> fence_own;   // [threads]: the thread's clock at its last fence
  std::vector<uint32_t> fence_seen;  // [threads][threads]: row of `clocks` at the last fence
  std::vector<uint32_t> barriers[kBarriers];
  const unsigned char* arena = nullptr;
  const unsigned char* arena_limit = nullptr;  // end of the mapping
  size_t smem_bytes = 0;
  uintptr_t stacks = 0, stacks_end = 0;
  uintptr_t host_stack = 0, host_stack_end = 0;
  uintptr_t module_base = 0, module = 0, module_end = 0;
  std::string module_path;
  std::vector<Cell> shared;
  std::unordered_map<uintptr_t, std::unique_ptr<Cell[]>> global;
  uintptr_t last_page = 0;
  Cell* last_cells = nullptr;
  std::unordered_map<uintptr_t, Meeting> meetings;
  std::vector<std::pair<Meeting*, size_t>> acquired;  // what this block has acquired
  std::vector<Site> sites;
  std::vector<std::pair<uintptr_t, uintptr_t>> regions;  // first, end

  uint32_t* of(int thread) {
    return clocks.data() + static_cast<size_t>(thread) * static_cast<size_t>(threads);
  }
};

Detector state;

void join(uint32_t* into, const uint32_t* from, int count) {
  for (int i = 0; i < count; ++i) into[i] = std::max(into[i], from[i]);
}

void find_module() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&find_module), &info) == 0) return;
  state.module_path = info.dli_fname;
  state.module_base = reinterpret_cast<uintptr_t>(info.dli_fbase);
  dl_iterate_phdr(
      [](dl_phdr_info* object, size_t, void*) {
        if (object->dlpi_addr != state.module_base) return 0;
        for (int i = 0; i < object->dlpi_phnum; ++i) {
          const auto& header = object->dlpi_phdr[i];
          if (header.p_type != PT_LOAD) continue;
          uintptr_t end = object->dlpi_addr + header.p_vaddr + header.p_memsz;
          state.module_end = std::max(state.module_end, end);
        }
        return 1;
      },
      nullptr);
  state.module = state.module_base;
}

void find_host_stack() {
  static pthread_t found_for = 0;
  if (found_for == pthread_self() && state.host_stack != 0) return;  // the query takes milliseconds
  found_for = pthread_self();
  pthread_attr_t attributes;
  if (pthread_getattr_np(pthread_self(), &attributes) != 0) return;
  void* first = nullptr;
  size_t bytes = 0;
  pthread_attr_getstack(&attributes, &first, &bytes);
  pthread_attr_destroy(&attributes);
  state.host_stack = reinterpret_cast<uintptr_t>(first);
  state.host_stack_end = state.host_stack + bytes;
}

uint32_t place_of(const Site& site) {
  for (size_t i = 0; i < state.sites.size(); ++i) {
    if (state.sites[i].line() == site.line() && state.sites[i].file_name() == site.file_name()) {
      return kSitePlace | static_cast<uint32_t>(i);
    }
  }
  state.sites.push_back(site);
  return kSitePlace | static_cast<uint32_t>(state.sites.size() - 1);
}

uint32_t place_of(const void* address) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(address) - 1 - state.module_base);
}

std::string base_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

// Returns file:line of a place. For inlined code, this is the first location outside the
// interpreter.
std::string text_of(uint32_t place) {
  if ((place & kSitePlace) != 0) {
    const Site& site = state.sites[place & ~kSitePlace];
    return base_name(site.file_name()) + ":" + std::to_string(site.line());
  }
  char command[64];
  std::snprintf(command, sizeof command, " -i 0x%x 2>/dev/null", place);
  FILE* pipe = popen(("addr2line -e '" + state.module_path + "'" + command).c_str(), "r");
  char line[1024];
  std::string found;
  while (pipe != nullptr && std::fgets(line, sizeof line, pipe) != nullptr) {
    std::string text = line;
    text.erase(text.find_last_not_of("\n") + 1);
    text = text.substr(0, text.find(" (discriminator"));
    bool ours = text.find("/csrc/simt/") != std::string::npos ||
                text.find("/csrc/common/") != std::string::npos;
    if (found.empty() || !ours) found = text;
    if (!ours) break;
  }
  if (pipe != nullptr) pclose(pipe);
  if (found.empty() || found[0] == '?')
    return "address " + std::to_string(place) + " of the module";
  return base_name(found);
}

// Returns whether another block's access is ordered before this block's accesses: the other block
// has published it with an atomic on an address that this block accessed atomically later.
bool acquired(const Epoch& epoch) {
  for (const auto& [meeting, count] : state.acquired) {
    auto found = meeting->position.find(epoch.block);
    if (found == meeting->position.end() || found->second >= count) continue;
    if (epoch.clock <= meeting->published[found->second][epoch.thread]) return true;
  }
  return false;
}

bool ordered(const Epoch& epoch, int thread) {
  if (epoch.block == state.block) {
    return epoch.thread == thread || epoch.clock <= state.of(thread)[epoch.thread];
  }
  return epoch.block < state.first_block || acquired(epoch);
}

enum class Kind { kRead, kWrite, kAtomicChange };

struct Access {
  Kind kind;
  int thread;
  uint32_t place;
};

const char* verb(const Epoch& epoch, bool write) {
  if ((epoch.flags & kAtomic) != 0) return "changed atomically";
  return write ? "written" : "read";
}

std::string who(const Epoch& epoch) {
  if (epoch.block != state.block) return "another block";
  return "thread " + std::to_string(epoch.thread);
}

[[noreturn]] void report_race(const Access& access,
                              const Epoch& other,
                              bool other_writes,
                              const std::string& where) {
  const char* doing = access.kind == Kind::kRead    ? "reads "
                      : access.kind == Kind::kWrite ? "writes "
                                                    : "changes atomically ";
  std::string how = verb(other, other_writes);
  std::string missing = other.block == state.block
                            ? ", with no barrier between"
                            : ", with no fence and atomic that say in which order";
  if ((other.flags & kInFlight) != 0) {
    how = "the target of a cp.async";
    missing = ", which has not been waited for";
    if (other.thread == access.thread) {
      fail_at(std::string(doing) + where + ", the target of its own cp.async (" +
                  text_of(other.place) + "), which it has not waited for",
              text_of(access.place));
    }
  }
  fail_at("race: it " + std::string(doing) + where + ", " + how + " by " + who(other) + " (" +
              text_of(other.place) + ")" + missing,
          text_of(access.place));
}

// Checks and records an access to one byte. `where` returns the description of the byte for error
// messages.
template <typename Where>
void touch(Cell& cell, const Access& access, bool is_shared, const Where& where) {
  auto live = [&](const Epoch& epoch) {
    return is_shared ? epoch.block == state.block : epoch.block >= state.first_block;
  };
  bool atomic = access.kind == Kind::kAtomicChange;
  auto harmless = [&](const Epoch& epoch) {
    return (atomic && (epoch.flags & kAtomic) != 0) || ordered(epoch, access.thread);
  };
  if (live(cell.write)) {
    if ((cell.write.flags & kInFlight) != 0 || !harmless(cell.write)) {
      report_race(access, cell.write, true, where());
    }
  } else if (is_shared && access.kind != Kind::kWrite) {
    fail_at("reads " + where() + ", which no thread of the block has written",
            text_of(access.place));
  }
  Epoch now{state.block,
            state.of(access.thread)[access.thread],
            access.place,
            static_cast<uint16_t>(access.thread),
            static_cast<uint16_t>(atomic ? kAtomic : 0)};
  if (access.kind != Kind::kRead) {
    for (const Epoch& read : cell.reads) {
      if (live(read) && !harmless(read)) report_race(access, read, false, where());
    }
    cell.write = now;
    for (Epoch& read : cell.reads) read.block = 0;
    return;
  }
  // A read that is ordered before this one can be dropped: whatever is ordered after this read is
  // also ordered after the earlier one.
  Epoch* slot = nullptr;
  for (Epoch& read : cell.reads) {
    if (live(read) && !ordered(read, access.thread)) continue;
    if (slot == nullptr) {
      slot = &read;
    } else {
      read.block = 0;
    }
  }
  if (slot == nullptr) slot = &cell.reads[kReads - 1];
  *slot = now;
}

// Checks all bytes of an access. Neighboring bytes usually have equal cells; if so, only the first
// one is checked.
template <typename Where>
void touch_all(
    Cell* cells, size_t count, const Access& access, bool is_shared, const Where& where) {
  Cell before = cells[0];
  touch(cells[0], access, is_shared, [&] { return where(size_t{0}); });
  for (size_t i = 1; i < count; ++i) {
    if (std::memcmp(&cells[i], &before, sizeof before) == 0) {
      cells[i] = cells[0];
    } else {
      touch(cells[i], access, is_shared, [&] { return where(i); });
    }
  }
}

bool in(uintptr_t address, uintptr_t first, uintptr_t end) {
  return address >= first && address < end;
}

void check_regions(uintptr_t address, size_t bytes, const Access& access) {
  if (state.regions.empty()) return;
  auto after = std::upper_bound(state.regions.begin(),
                                state.regions.end(),
                                address,
                                [](uintptr_t value, const std::pair<uintptr_t, uintptr_t>& region) {
                                  return value < region.first;
                                });
  if (after != state.regions.begin() && address + bytes <= (after - 1)->second) return;
  fail_at(std::string(access.kind == Kind::kRead ? "reads " : "writes ") + std::to_string(bytes) +
              " bytes of global memory outside every tensor of the call",
          text_of(access.place));
}

void look(const void* pointer, size_t bytes, const Access& access) {
  auto address = reinterpret_cast<uintptr_t>(pointer);
  if (in(address, state.stacks, state.stacks_end) ||
      in(address, state.host_stack, state.host_stack_end) ||
      in(address, state.module, state.module_end)) {
    return;
  }
  auto* byte = static_cast<const unsigned char*>(pointer);
  if (byte >= state.arena &&
      byte < state.arena_limit + kPage) {  // including the guard page after it
    auto offset = static_cast<size_t>(byte - state.arena);
    if (offset + bytes > state.smem_bytes) {
      fail_at("byte " + std::to_string(offset + bytes - 1) + " of a shared memory of " +
                  std::to_string(state.smem_bytes) + " bytes",
              text_of(access.place));
    }
    touch_all(&state.shared[offset], bytes, access, true, [&](size_t i) {
      return "byte " + std::to_string(offset + i) + " of shared memory";
    });
    return;
  }
  check_regions(address, bytes, access);
  while (bytes > 0) {
    uintptr_t page = address / kPage;
    if (page != state.last_page || state.last_cells == nullptr) {
      auto& cells = state.global[page];
      if (!cells) cells = std::make_unique<Cell[]>(kPage);
      state.last_page = page;
      state.last_cells = cells.get();
    }
    size_t count = std::min(bytes, kPage - address % kPage);
    touch_all(state.last_cells + address % kPage, count, access, false, [&](size_t i) {
      for (const auto& [first, end] : state.regions) {
        if (in(address + i, first, end)) {
          return "byte " + std::to_string(address + i - first) + " of a tensor of " +
                 std::to_string(end - first) + " bytes";
        }
      }
      return std::string("a byte of global memory");
    });
    address += count;
    bytes -= count;
  }
}

}  // namespace

namespace detector {

void begin_launch(int threads,
                  const unsigned char* stacks,
                  size_t stacks_bytes,
                  const unsigned char* arena_end) {
  if (state.module_base == 0) find_module();
  find_host_stack();
  auto count = static_cast<size_t>(threads);
  state.threads = threads;
  state.stacks = reinterpret_cast<uintptr_t>(stacks);
  state.stacks_end = state.stacks + stacks_bytes;
  state.arena_limit = arena_end;
  state.clocks.assign(count * count, 0);
  state.fence_seen.assign(count * count, 0);
  state.shared.resize(kMaxSharedBytes);
  state.meetings.clear();
  state.first_block = state.block + 1;
  // Tensors are allocated and freed between launches, so records about their memory must not
  // accumulate.
  constexpr size_t kMostPages = 1024;
  if (state.global.size() > kMostPages) {
    state.global.clear();
    state.last_cells = nullptr;
  }
}

void begin_block(const unsigned char* arena, size_t smem_bytes) {
  auto count = static_cast<size_t>(state.threads);
  ++state.block;
  state.arena = arena;
  state.smem_bytes = smem_bytes;
  std::fill(state.clocks.begin(), state.clocks.end(), 0);
  std::fill(state.fence_seen.begin(), state.fence_seen.end(), 0);
  state.fence_own.assign(count, 0);
  for (auto& barrier : state.barriers) barrier.assign(count, 0);
  for (int thread = 0; thread < state.threads; ++thread) state.of(thread)[thread] = 1;
  state.acquired.clear();
}

void sync_lanes(int warp, uint32_t mask) {
  int first = warp * kLanes;
  static std::vector<uint32_t> joined;
  joined.assign(static_cast<size_t>(state.threads), 0);
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) != 0) join(joined.data(), state.of(first + lane), state.threads);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((mask >> lane & 1) == 0) continue;
    uint32_t* own = state.of(first + lane);
    std::copy(joined.begin(), joined.end(), own);
    ++own[first + lane];
  }
}

void arrive(int barrier, int thread) {
  join(state.barriers[barrier].data(), state.of(thread), state.threads);
  ++state.of(thread)[thread];
}

void pass(int barrier, int thread) {
  join(state.of(thread), state.barriers[barrier].data(), state.threads);
}

void reset(int barrier) {
  std::fill(state.barriers[barrier].begin(), state.barriers[barrier].end(), 0);
}

void issue(const void* smem, const Site& site) {
  on_write(smem, 16, site);
  auto offset = static_cast<size_t>(static_cast<const unsigned char*>(smem) - state.arena);
  for (size_t i = 0; i < 16; ++i) state.shared[offset + i].write.flags = kInFlight;
}

void land(const void* smem, const Site& site) {
  auto offset = static_cast<size_t>(static_cast<const unsigned char*>(smem) - state.arena);
  for (size_t i = 0; i < 16; ++i) state.shared[offset + i].write.flags = 0;
  on_write(smem, 16, site);
}

}  // namespace detector

void on_read(const void* pointer, size_t bytes, const Site& site, int thread) {
  look(pointer, bytes, {Kind::kRead, thread < 0 ? current_thread : thread, place_of(site)});
}

void on_write(const void* pointer, size_t bytes, const Site& site) {
  look(pointer, bytes, {Kind::kWrite, current_thread, place_of(site)});
}

void on_fence() {
  auto count = static_cast<size_t>(state.threads);
  auto thread = static_cast<size_t>(current_thread);
  uint32_t* own = state.of(current_thread);
  state.fence_own[thread] = own[thread];
  std::copy(
      own, own + count, state.fence_seen.begin() + static_cast<std::ptrdiff_t>(thread * count));
  ++own[thread];
}

void on_atomic(const void* pointer, size_t bytes, const Site& site) {
  look(pointer, bytes, {Kind::kAtomicChange, current_thread, place_of(site)});
  auto address = reinterpret_cast<uintptr_t>(pointer);
  if (in(address, state.module, state.module_end)) return;
  if (address >= reinterpret_cast<uintptr_t>(state.arena) &&
      address < reinterpret_cast<uintptr_t>(state.arena_limit)) {
    return;
  }
  // The block acquires what other blocks have published here, and publishes what its own threads
  // have fenced. Each thread is published up to the later of two of its clocks: that of its last
  // fence, as far as the current thread has seen it; and the one that the current thread had seen
  // at its own last fence.
  Meeting& meeting = state.meetings[address];
  auto found = std::find_if(state.acquired.begin(), state.acquired.end(), [&](const auto& entry) {
    return entry.first == &meeting;
  });
  if (found == state.acquired.end()) {
    state.acquired.push_back({&meeting, meeting.published.size()});
  } else {
    found->second = meeting.published.size();
  }
  auto [entry, is_new] = meeting.position.try_emplace(state.block, meeting.published.size());
  if (is_new) meeting.published.emplace_back(static_cast<size_t>(state.threads), 0);
  std::vector<uint32_t>& published = meeting.published[entry->second];
  const uint32_t* own = state.of(current_thread);
  const uint32_t* seen = state.fence_seen.data() +
                         static_cast<size_t>(current_thread) * static_cast<size_t>(state.threads);
  for (size_t i = 0; i < published.size(); ++i) {
    published[i] = std::max({published[i], std::min(own[i], state.fence_own[i]), seen[i]});
  }
}

void set_regions(std::vector<std::pair<uintptr_t, uintptr_t>> regions) {
  std::sort(regions.begin(), regions.end());
  // Merge overlapping views into one region.
  std::vector<std::pair<uintptr_t, uintptr_t>> merged;
  for (const auto& region : regions) {
    if (!merged.empty() && region.first < merged.back().second) {
      merged.back().second = std::max(merged.back().second, region.second);
    } else {
      merged.push_back(region);
    }
  }
  state.regions = std::move(merged);
}

namespace {

void hook(const void* pointer, size_t bytes, Kind kind, const void* caller) {
  if (current_thread < 0) return;  // host code of a kernel file
  look(pointer, bytes, {kind, current_thread, place_of(caller)});
}

}  // namespace
}  // namespace specops::simt

#define SPECOPS_HOOK(name, kind, bytes)                                              \
  extern "C" void name(void* pointer) {                                              \
    specops::simt::hook(pointer,                                                     \
                        bytes,                                                       \
                        specops::simt::Kind::kind,                                   \
                        __builtin_extract_return_addr(__builtin_return_address(0))); \
  }
#define SPECOPS_HOOKS(bytes)                                 \
  SPECOPS_HOOK(__tsan_read##bytes, kRead, bytes)             \
  SPECOPS_HOOK(__tsan_write##bytes, kWrite, bytes)           \
  SPECOPS_HOOK(__tsan_unaligned_read##bytes, kRead, bytes)   \
  SPECOPS_HOOK(__tsan_unaligned_write##bytes, kWrite, bytes) \
  SPECOPS_HOOK(__tsan_volatile_read##bytes, kRead, bytes)    \
  SPECOPS_HOOK(__tsan_volatile_write##bytes, kWrite, bytes)
SPECOPS_HOOKS(1)
SPECOPS_HOOKS(2)
SPECOPS_HOOKS(4)
SPECOPS_HOOKS(8)
SPECOPS_HOOKS(16)

extern "C" {
void __tsan_read_range(void* pointer, size_t bytes) {
  specops::simt::hook(pointer, bytes, specops::simt::Kind::kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* pointer, size_t bytes) {
  specops::simt::hook(pointer, bytes, specops::simt::Kind::kWrite, __builtin_return_address(0));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
// Guards of static variables in host code.
unsigned char __tsan_atomic8_load(const volatile unsigned char* pointer, int) {
  return __atomic_load_n(pointer, __ATOMIC_ACQUIRE);
}
}

#endif
