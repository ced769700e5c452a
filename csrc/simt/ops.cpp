// SPDX-License-Identifier: Apache-2.0
// Settings and counters of the interpreter, as functions that tests call.
#include "simt/ops.h"

#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "simt/machine.h"

namespace specops {
namespace {

template <typename Enum, size_t kCount>
Enum choose(const char* what, const std::string& name, const char* const (&names)[kCount]) {
  for (size_t i = 0; i < kCount; ++i) {
    if (name == names[i]) return static_cast<Enum>(i);
  }
  std::string known;
  for (const char* one : names) known += std::string(known.empty() ? "" : ", ") + one;
  throw std::invalid_argument(std::string(what) + " must be one of " + known + ", got '" + name +
                              "'");
}

void set_schedule(const std::string& name, uint64_t seed) {
  simt::settings.schedule = choose<simt::Schedule>(
      "schedule", name, {"in_order", "reverse", "warp_at_a_time", "last_warp_first", "random"});
  simt::settings.seed = seed;
}

void set_landing(const std::string& name) {
  simt::settings.landing = choose<simt::Landing>("landing", name, {"late", "early", "random"});
}

void set_accumulation(const std::string& name) {
  simt::settings.accumulation =
      choose<simt::Accumulation>("accumulation", name, {"fma", "hopper", "ampere"});
}

void set_num_sms(int count) {
  if (count < 1) throw std::invalid_argument("num_sms must be at least 1");
  simt::settings.num_sms = count;
}

// Sets the largest shared memory of a block; 0 means the maximum.
void set_max_shared_bytes(int count) {
  constexpr int kMost = static_cast<int>(simt::kMaxSharedBytes);
  if (count < 0 || count > kMost) {
    throw std::invalid_argument("max_shared_bytes must be at most " + std::to_string(kMost));
  }
  simt::settings.max_shared_bytes = count == 0 ? kMost : count;
}

pybind11::dict counters() {
  const simt::Counters& now = simt::counters;
  pybind11::dict out;
  out["launches"] = now.launches;
  out["blocks"] = now.blocks;
  out["barriers"] = now.barriers;
  out["collectives"] = now.collectives;
  out["mmas"] = now.mmas;
  out["copied_bytes"] = now.copied_bytes;
  out["switches"] = now.switches;
  out["bank_conflict"] = now.bank_conflict;
  out["bank_conflict_site"] = now.bank_conflict_site;
  return out;
}

}  // namespace

void register_simt(pybind11::module_& m) {
  m.def("set_schedule", &set_schedule);
  m.def("set_landing", &set_landing);
  m.def("set_accumulation", &set_accumulation);
  m.def("set_num_sms", &set_num_sms);
  m.def("set_max_shared_bytes", &set_max_shared_bytes);
  m.def("set_fuzz", [](uint64_t seed) { simt::settings.fuzz = seed; });
  m.def("set_bank_conflicts", [](bool on) { simt::settings.bank_conflicts = on; });
  m.def("set_regions", [](const std::vector<std::pair<uintptr_t, uintptr_t>>& regions) {
    simt::set_regions(regions);
  });
  m.def("counters", &counters);
  m.def("reset_counters", [] { simt::counters = {}; });
}

}  // namespace specops
