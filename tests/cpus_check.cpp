// SPDX-License-Identifier: Apache-2.0
// Prints the quota in CPUs, then the node of each CPU, as cpus.h reads them from the file system
// whose root is the argument.
#include <cstdio>

#include "common/cpus.h"

int main(int, char** argv) {
  std::printf("%d\n", specops::quota_cpus(argv[1]));
  for (int node : specops::nodes_of_cpus(argv[1])) std::printf("%d ", node);
  return 0;
}
