// SPDX-License-Identifier: Apache-2.0
// A parameter that is either one number for all rows (or requests), or an array with one number for
// each.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"

namespace specops {

template <typename T>
struct PerRow {
  const T* values = nullptr;  // nullptr: `value` for all rows
  T value{};

  SPECOPS_HOST_DEVICE_MEMBER T operator[](int64_t idx) const {
    return values != nullptr ? values[idx] : value;
  }
};

// Returns the fault of entry idx of a PerRow parameter.
template <typename T>
SPECOPS_HOST_DEVICE Fault fault_at(ErrorCode code, const PerRow<T>& parameter, int64_t idx, T got) {
  return fault_at(code, static_cast<double>(got), parameter.values ? idx : -1);
}

}  // namespace specops
