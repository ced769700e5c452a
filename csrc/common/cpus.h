// SPDX-License-Identifier: Apache-2.0
// CPUs available to this process according to the operating system: affinity mask, cgroup quota,
// memory nodes.
#pragma once

#include <string>
#include <vector>

namespace specops {

// Returns the CPUs that the calling thread may run on; only CPU 0 if they are unknown.
std::vector<int> allowed_cpus();

// Returns the CPU that the calling thread runs on now; -1 if unknown.
int current_cpu();

// A CPU that a thread avoids. If other code changes the thread's mask meanwhile, that mask is
// respected.
class AvoidedCpu {
 public:
  // Excludes `cpu` from the calling thread's mask, if other CPUs remain, and allows the previous
  // one again.
  void set(int cpu);

 private:
  std::vector<int> whole_, narrowed_;  // the mask before the exclusion, and after it
};

// Returns how many CPUs' time the process's control groups grant, the minimum over them and their
// parents: cpu.max of version 2, cfs_quota_us of version 1. Fractions are rounded down, but to at
// least 1: a thread too many would exhaust the quota and stall until the next period with a claimed
// chunk. 0: no limit. `root` is the root of the file system; tests pass others.
int quota_cpus(const std::string& root = "");

// Returns the memory node of each CPU, counted from 0; empty if there is one node or it is unknown.
std::vector<int> nodes_of_cpus(const std::string& root = "");

// Returns SPECOPS_NUM_THREADS, or the number that the mask and the quota allow. Two hyperthreads of
// a core count as two CPUs. Throws std::invalid_argument unless the variable is a number from 1 to
// kMaxThreads.
int default_num_threads();

}  // namespace specops
