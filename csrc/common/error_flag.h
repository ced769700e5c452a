// SPDX-License-Identifier: Apache-2.0
// Error reporting of CUDA kernels for invalid tensor data: one int32 per device; 0 means no error.
// The first error wins; the kernel skips the invalid row. Plain C++; report_error() is in
// device.cuh.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/host_device.h"

namespace specops {

// Declares an error code and its sentence, in the header of the op that reports it:
//   SPECOPS_FAULT(2006, kAttentionPage) = "append_attention: batch.kv_indices must be ...";
// Each op family has a range of a thousand codes, which its ops.cpp registers. A second sentence
// for the same code is a compiler error. The form of the sentences is described in
// error_sentence.h; kernels use only the codes.
enum class ErrorCode : int32_t { kNone = 0 };

template <int32_t code>
inline constexpr const char* kSentence = nullptr;

#define SPECOPS_FAULT(code, name)        \
  inline constexpr ErrorCode name{code}; \
  template <>                            \
  inline constexpr const char* kSentence<code>

// Result of a check of argument values: the violated rule and the element that violates it. CUDA
// kernels use only the code.
struct Fault {
  ErrorCode code = ErrorCode::kNone;
  bool has_value = false;  // false if the argument is absent, or has more than one number
  double value = 0.0;
  int64_t i = -1;  // index of the element; -1: the argument is a single number
  int64_t j = -1;  // index in a second dimension
  // Limits that the rule compares with, in the order in which its sentence names them; -1: none.
  int64_t limit = -1;
  int64_t limit2 = -1;

  SPECOPS_HOST_DEVICE_MEMBER bool found() const { return code != ErrorCode::kNone; }

  SPECOPS_HOST_DEVICE_MEMBER Fault with(int64_t first, int64_t second = -1) const {
    Fault out = *this;
    out.limit = first;
    out.limit2 = second;
    return out;
  }
};

// Returns the fault of the number `got`, which is element i or [i, j] of an argument, or the whole
// argument.
SPECOPS_HOST_DEVICE Fault fault_at(ErrorCode code, double got, int64_t i = -1, int64_t j = -1) {
  return {.code = code, .has_value = true, .value = got, .i = i, .j = j};
}

struct ErrorFlag {
  int32_t* code = nullptr;  // on the device
};

struct TakeErrorParams {
  ErrorFlag error;
  int32_t* out;  // [1]; receives the code, and the flag is cleared
};

ErrorFlag error_flag(int device);  // returns the flag of a device
int32_t take_error_sync(
    int device);  // waits for all work of the device, then reads and clears the flag
SPECOPS_DECLARE_CUDA(take_error_cuda, TakeErrorParams);

}  // namespace specops
