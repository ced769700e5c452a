// SPDX-License-Identifier: Apache-2.0
// Destination of the phase times of an op's stamped kernel: an array that benchmarks set with a
// separate call.
#pragma once

#include <cstdint>
#include <mutex>

#include "common/tensor_view.h"

namespace specops {

struct PhaseStamps {
  int64_t* words = nullptr;  // [blocks, words per block]; nullptr: no stamps
  int64_t blocks = 0;
};

class GivenPhaseStamps {
 public:
  PhaseStamps get() {
    std::lock_guard<std::mutex> lock(mutex_);
    return given_;
  }

  // Sets the array. `op`: name of the calling op, for error messages.
  void set(const char* op, const TensorView& stamps, int64_t words_of_block) {
    Checker check(op);
    Dim blocks{"blocks"}, words{"words", words_of_block};
    check.optional("stamps", stamps, {DType::kInt64}, {&blocks, &words});
    if (stamps.defined() && !check.on_cuda()) check.fail("stamps", "on cuda", "a tensor on cpu");
    std::lock_guard<std::mutex> lock(mutex_);
    given_ = {stamps.data<int64_t>(), stamps.defined() ? blocks.value : 0};
  }

 private:
  std::mutex mutex_;
  PhaseStamps given_;
};

}  // namespace specops
