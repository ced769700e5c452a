// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

namespace specops {
namespace {

// Releases the GIL while an op runs, if the op takes long enough (about 50 us) for that to pay off.
class ReleaseGil {
 public:
  explicit ReleaseGil(bool worth_it) {
    if (worth_it) release_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> release_;
};

}  // namespace

void register_runtime(pybind11::module_& m);
}  // namespace specops
