// SPDX-License-Identifier: Apache-2.0
// embedding: looks up one row of a table per token id.
#pragma once

#include <cstdint>

#include "common/error_flag.h"
#include "common/host_device.h"
#include "common/isa.h"

namespace specops {

struct EmbeddingParams {
  const int32_t* token_ids;  // [rows], each in [0, vocab); validated beforehand on the CPU
  const void* weight;        // [vocab, width], contiguous
  void* out;                 // [rows, width], contiguous
  int64_t rows;
  int64_t vocab;
  int64_t row_bytes;  // width in bytes
  ErrorFlag error;    // CUDA: set to kEmbeddingTokenId for an invalid id
};

SPECOPS_FAULT(1001, kEmbeddingTokenId) = "embedding: token_ids must be in [0, vocab{=#})";

SPECOPS_HOST_DEVICE Fault find_fault(const EmbeddingParams& params, int64_t row) {
  int32_t id = params.token_ids[row];
  if (id >= 0 && id < params.vocab) return {};
  return fault_at(kEmbeddingTokenId, id, row).with(params.vocab);
}

SPECOPS_DECLARE_CPU(embedding_cpu, EmbeddingParams);
SPECOPS_DECLARE_CUDA(embedding_cuda, EmbeddingParams);

}  // namespace specops
