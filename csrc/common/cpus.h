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

// Makes the calling thread avoid a CPU. If other code changes the thread's affinity mask in
// between, the class does not overwrite that mask.
class AvoidedCpu {
 public:
  // Removes `cpu` from the calling thread's mask, if other CPUs remain, and adds the previously
  // avoided CPU again.
  void set(int cpu);

 private:
  std::vector<int> whole_, narrowed_;  // the mask before the exclusion, and after it
};

// Returns how many CPUs the cgroup quotas of this process allow: the minimum over its groups and
// their parents, from cpu.max (version 2) or cfs_quota_us (version 1). 0: no limit. A fraction is
// rounded down, but to at least 1: with one thread too many, the quota would run out, and a thread
// that holds a claimed chunk would stall until the next period. `root` is the root of the file
// system; tests pass another one.
int quota_cpus(const std::string& root = "");

// Returns the memory node of each CPU. Nodes are counted from 0. Empty if there is only one node or
// the nodes are unknown.
std::vector<int> nodes_of_cpus(const std::string& root = "");

// Returns the value of SPECOPS_NUM_THREADS or, if it is not set, the number of CPUs that the
// affinity mask and the quota allow. Two hyperthreads of a core count as two CPUs. Throws
// std::invalid_argument if the variable is not a number from 1 to kMaxThreads.
int default_num_threads();

}  // namespace specops
