// SPDX-License-Identifier: Apache-2.0
// Conversion of memory faults in kernels to launch errors.
#pragma once

#include <cstdint>
#include <string>

namespace specops::simt {

// While a guard exists, a memory fault in a kernel's thread ends the launch instead of the process.
class FaultGuard {
 public:
  FaultGuard();
  ~FaultGuard();
  FaultGuard(const FaultGuard&) = delete;
  FaultGuard& operator=(const FaultGuard&) = delete;
};

// Return a description of a faulting address, and where the thread synchronized last.
std::string describe_fault(uintptr_t address);
std::string last_place();

}  // namespace specops::simt
