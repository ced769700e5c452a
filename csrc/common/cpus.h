// SPDX-License-Identifier: Apache-2.0
// The CPUs that this process may use, as the operating system says: its mask, its share, its memory.
#pragma once

#include <string>
#include <vector>

namespace specops {

// The numbers of the CPUs that the calling thread may run on; one, 0, where nobody says.
std::vector<int> allowed_cpus();

// The CPU that the calling thread runs on at the moment; -1 where nobody says.
int current_cpu();

// The one CPU that a thread keeps off. Whoever else sets the thread's mask meanwhile is obeyed.
class AvoidedCpu {
 public:
  // Called by that thread: it leaves this CPU, if it may run on others, and may use the one before again.
  void set(int cpu);

 private:
  std::vector<int> whole_, narrowed_;  // the mask as it was before, and as this made it
};

// How many CPUs' time the process's control groups grant it, the least of them and their parents:
// cpu.max of version 2, cfs_quota_us of version 1. A part of a CPU counts for none, but the least is 1:
// a thread more than the quota has time for stands still with a claimed chunk until the next period.
// 0: no limit. `root` is where the file system begins; tests have others.
int quota_cpus(const std::string& root = "");

// By CPU number the memory node it belongs to, counted from 0; empty: there is one, or nobody says.
std::vector<int> nodes_of_cpus(const std::string& root = "");

// SPECOPS_NUM_THREADS, or as many as the mask and the quota allow. Two threads of one core count as two
// CPUs. Throws std::invalid_argument if the variable is anything but a number from 1 to kMaxThreads.
int default_num_threads();

}  // namespace specops
