// SPDX-License-Identifier: Apache-2.0
// sample: one token per row of logits.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace specops {

struct SampleParams {
  const void* logits;           // [rows, vocab_size], rows logits_stride apart
  const int32_t* positions;     // [rows], absolute position of the token being chosen
  const float* temperature;     // [rows], 0 = greedy
  const int32_t* top_k;         // [rows], 0 or -1 = off
  const float* top_p;           // [rows], 1 = off
  const float* min_p;           // [rows], 0 = off
  const int64_t* seeds;         // [rows], the bits of an unsigned 64-bit seed
  const int32_t* choice_index;  // [rows], may be nullptr (all 0)
  float* logprobs;              // [rows], may be nullptr
  int32_t* token_ids;           // [rows]
  int64_t rows;
  int64_t vocab_size;
  int64_t logits_stride;  // elements between rows
  DType dtype;            // of logits: float32 or bfloat16
};

SPECOPS_DECLARE_CPU(sample_cpu, SampleParams);

}  // namespace specops
