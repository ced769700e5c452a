// SPDX-License-Identifier: Apache-2.0
// Memory faults of kernels as errors of the launch.
#pragma once

#include <cstdint>
#include <string>

namespace specops::simt {

// While it lives, a memory fault of a kernel's thread ends the launch, not the process.
class FaultGuard {
 public:
  FaultGuard();
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;
};

// What the machine knows of a faulting address, and where the thread last met others.
std::string describe_fault(uintptr_t address);
std::string last_place();

}  // namespace specops::simt
