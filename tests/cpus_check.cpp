// SPDX-License-Identifier: Apache-2.0
// Prints what cpus.h reads from a file system rooted at the argument: the quota in CPUs, then the
// node of each CPU.
#include <cstdio>

#include "common/cpus.h"

int main(int, char** argv) {
  std::printf("%d\n", specops::quota_cpus(argv[1]));
  for (int node : specops::nodes_of_cpus(argv[1])) std::printf("%d ", node);
  return 0;
}
