// SPDX-License-Identifier: Apache-2.0
// A parameter that is one number for all rows (or requests), or an array with one each.
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace specops {

template <typename T>
struct PerRow {
  const T* values = nullptr;  // nullptr: `value` for all
  T value{};

  SPECOPS_HOST_DEVICE_MEMBER T operator[](int64_t idx) const {
    return values != nullptr ? values[idx] : value;
  }
};

}  // namespace specops
