// SPDX-License-Identifier: Apache-2.0
// embedding: one row of a table per token id.
#pragma once

#include <cstdint>

#include "common/isa.h"

namespace specops {

struct EmbeddingParams {
  const int32_t* token_ids;  // [rows], each in [0, vocab)
  const void* weight;        // [vocab, width], contiguous
  void* out;                 // [rows, width], contiguous
  int64_t rows;
  int64_t row_bytes;  // width in bytes
};

SPECOPS_DECLARE_CPU(embedding_cpu, EmbeddingParams);

}  // namespace specops
