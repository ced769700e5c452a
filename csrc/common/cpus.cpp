// SPDX-License-Identifier: Apache-2.0
#include "common/cpus.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include "common/parallel.h"

#ifdef __linux__
#include <sched.h>
#endif

namespace specops {
namespace {

// Returns the number of CPUs that a CPU-time quota per period allows; both are in the same unit. 0:
// no limit.
int cpus_of(double quota, double period) {
  if (!(quota > 0) || !(period > 0)) return 0;
  return static_cast<int>(std::clamp(quota / period, 1.0, static_cast<double>(kMaxThreads)));
}

int fewer(int a, int b) { return a == 0 || (b != 0 && b < a) ? b : a; }

// Returns the CPU limit in a group's cpu.max (cgroup version 2), such as "max 100000" or "150000
// 100000".
int cpus_of_version_2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  double quota = 0, period = 0;
  return file >> quota >> period ? cpus_of(quota, period) : 0;
}

// Returns the CPU limit in cfs_quota_us, where -1 means no limit, and cfs_period_us (cgroup version
// 1).
int cpus_of_version_1(const std::string& folder) {
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us"),
      period_file(folder + "/cpu.cfs_period_us");
  double quota = 0, period = 0;
  return quota_file >> quota && period_file >> period ? cpus_of(quota, period) : 0;
}

bool has_word(const std::string& text, const std::string& word) {
  return ("," + text + ",").find("," + word + ",") != std::string::npos;
}

// A mounted cgroup hierarchy: the group that is visible as its root directory, and the mount point.
struct Mount {
  std::string root, point;
  bool is_version_2;
};

// Parses mountinfo lines: id, parent, device, root, point, options, .. - type, source, options.
std::vector<Mount> cpu_mounts(const std::string& root) {
  std::vector<Mount> mounts;
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string skipped, type, options;
    Mount mount;
    words >> skipped >> skipped >> skipped >> mount.root >> mount.point;
    while (words >> skipped && skipped != "-") continue;
    words >> type >> skipped >> options;
    mount.is_version_2 = type == "cgroup2";
    if (mount.is_version_2 || (type == "cgroup" && has_word(options, "cpu"))) {
      mounts.push_back(mount);
    }
  }
  return mounts;
}

// Returns the lowest CPU limit of a group and its parents, as far as the mount shows the parents.
int cpus_of_group(const std::string& root, const Mount& mount, std::string path) {
  // Inside a container, /proc may show the group's path on the host although the container's mount
  // begins at that group.
  if (mount.root != "/" && path.rfind(mount.root, 0) == 0) path.erase(0, mount.root.size());
  int least = 0;
  while (true) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    std::string folder = root + mount.point + path;
    least =
        fewer(least, mount.is_version_2 ? cpus_of_version_2(folder) : cpus_of_version_1(folder));
    if (path.empty()) return least;
    path.erase(path.find_last_of('/') == std::string::npos ? 0 : path.find_last_of('/'));
  }
}

// Returns the numbers in a list such as "0-3,8,10-11", read from a file.
std::vector<int> listed(const std::string& path) {
  std::vector<int> numbers;
  std::ifstream file(path);
  for (std::string part; std::getline(file, part, ',');) {
    int first = 0, last = 0;
    char dash = 0;
    std::istringstream words(part);
    if (!(words >> first)) continue;
    if (!(words >> dash >> last)) last = first;
    for (int number = first; number <= last; ++number) numbers.push_back(number);
  }
  return numbers;
}

// Restricts the calling thread to `cpus`, even if the thread now runs on another CPU. Returns false
// if that is not permitted.
bool run_on(const std::vector<int>& cpus) {
#ifdef __linux__
  std::vector<cpu_set_t> mask(static_cast<size_t>(cpus.back()) / CPU_SETSIZE + 1);
  const size_t bytes = mask.size() * sizeof(cpu_set_t);
  for (int cpu : cpus) CPU_SET_S(static_cast<size_t>(cpu), bytes, mask.data());
  return sched_setaffinity(0, bytes, mask.data()) == 0;
#else
  static_cast<void>(cpus);  // not supported on this system
  return false;
#endif
}

}  // namespace

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
#ifdef __linux__
  // The kernel rejects a set that is smaller than the kernel's own, so try larger ones.
  for (int size = 1024; size <= 1 << 16 && cpus.empty(); size *= 4) {
    cpu_set_t* set = CPU_ALLOC(static_cast<size_t>(size));
    size_t bytes = CPU_ALLOC_SIZE(static_cast<size_t>(size));
    if (set != nullptr && sched_getaffinity(0, bytes, set) == 0) {
      for (int cpu = 0; cpu < size; ++cpu) {
        if (CPU_ISSET_S(static_cast<size_t>(cpu), bytes, set)) cpus.push_back(cpu);
      }
    }
    CPU_FREE(set);
  }
#else
  for (unsigned cpu = 0; cpu < std::thread::hardware_concurrency(); ++cpu) {
    cpus.push_back(static_cast<int>(cpu));
  }
#endif
  if (cpus.empty()) cpus.push_back(0);
  return cpus;
}

int current_cpu() {
#ifdef __linux__
  return sched_getcpu();
#else
  return -1;
#endif
}

void AvoidedCpu::set(int cpu) {
  std::vector<int> mask = allowed_cpus();
  if (mask == std::exchange(narrowed_, {})) mask = whole_;
  std::vector<int> others;
  std::remove_copy(mask.begin(), mask.end(), std::back_inserter(others), cpu);
  if (others.empty() || !run_on(others)) return;
  whole_ = std::move(mask);
  narrowed_ = std::move(others);
}

int quota_cpus(const std::string& root) {
  int least = 0;
  std::vector<Mount> mounts = cpu_mounts(root);
  std::ifstream file(root + "/proc/self/cgroup");
  // Format of a line: number:controllers:path. "0::path" is version 2.
  for (std::string line; std::getline(file, line);) {
    size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    std::string controllers = line.substr(first + 1, second - first - 1);
    bool is_version_2 = controllers.empty();
    if (!is_version_2 && !has_word(controllers, "cpu")) continue;
    for (const Mount& mount : mounts) {
      if (mount.is_version_2 != is_version_2) continue;
      least = fewer(least, cpus_of_group(root, mount, line.substr(second + 1)));
    }
  }
  return least;
}

std::vector<int> nodes_of_cpus(const std::string& root) {
  const std::string folder = root + "/sys/devices/system/node/";
  std::vector<int> nodes;
  int count = 0;
  for (int node : listed(folder + "has_cpu")) {
    for (int cpu : listed(folder + "node" + std::to_string(node) + "/cpulist")) {
      if (cpu >= static_cast<int>(nodes.size())) nodes.resize(static_cast<size_t>(cpu) + 1, 0);
      nodes[static_cast<size_t>(cpu)] = count;
    }
    ++count;
  }
  if (count < 2) nodes.clear();
  return nodes;
}

int default_num_threads() {
  const char* text = std::getenv("SPECOPS_NUM_THREADS");
  if (text == nullptr || *text == '\0') {
    int cpus = static_cast<int>(std::min<size_t>(allowed_cpus().size(), kMaxThreads));
    return fewer(quota_cpus(), cpus);
  }
  std::string value = text;
  int count = 0;
  auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), count);
  if (error != std::errc{} || end != value.data() + value.size() || count < 1 ||
      count > kMaxThreads) {
    throw std::invalid_argument("SPECOPS_NUM_THREADS must be a whole number from 1 to " +
                                std::to_string(kMaxThreads) + ", got '" + value + "'");
  }
  return count;
}

}  // namespace specops
