// SPDX-License-Identifier: Apache-2.0
// The source of random numbers of the row functions. They accept any object with this call
// operator, so that tests can pass scripted numbers. Plain C++ and CUDA.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/philox.h"

namespace specops {

// Uniforms for the decisions about one token. Each call passes a sub-index, which replaces the one
// in `key`.
struct PhiloxSource {
  UniformKey key;

  SPECOPS_HOST_DEVICE_MEMBER float operator()(Purpose purpose, uint32_t sub_index) const {
    UniformKey own = key;
    own.sub_index = sub_index;
    return philox_uniform(own, purpose);
  }
};

}  // namespace specops
