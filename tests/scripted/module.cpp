// SPDX-License-Identifier: Apache-2.0
// The sampling ops, unchanged, with scripted uniforms (common/philox.h beside this file).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <mutex>
#include <utility>
#include <vector>

#include "common/ops.h"
#include "common/philox.h"
#include "sampling/ops.h"
#if defined(SPECOPS_SIMT)
#include "simt/ops.h"
#endif

namespace specops {
namespace {

// position, purpose, choice_index, sub_index, anchor
using Key = std::array<uint32_t, 5>;

const float* uniforms = nullptr;  // [rows, columns], owned by the caller
size_t rows = 0;
size_t columns = 0;
std::vector<Key> keys;  // the first `columns` have uniforms
std::mutex mutex;

}  // namespace

float scripted_uniform(const UniformKey& key, Purpose purpose) {
  Key wanted{
      key.position, static_cast<uint32_t>(purpose), key.choice_index, key.sub_index, key.anchor};
  for (size_t column = 0; column < columns; ++column) {
    if (keys[column] != wanted) continue;
    return key.seed < rows ? uniforms[key.seed * columns + column] : 0.0f;
  }
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t column = columns; column < keys.size(); ++column) {
    if (keys[column] == wanted) return 0.0f;
  }
  keys.push_back(wanted);
  return 0.0f;
}

}  // namespace specops

PYBIND11_MODULE(SPECOPS_MODULE, m) {
  using namespace specops;
  m.def("set_uniforms", [](std::vector<Key> given, uintptr_t address, size_t num_rows) {
    keys = std::move(given);
    uniforms = reinterpret_cast<const float*>(address);
    columns = keys.size();
    rows = num_rows;
  });
  // Returns the keys requested so far: those that the caller passed, then those without a uniform.
  m.def("asked_keys", [] { return keys; });
  register_runtime(m);
  register_sampling(m);
#if defined(SPECOPS_SIMT)
  register_simt(m);
#endif
}
