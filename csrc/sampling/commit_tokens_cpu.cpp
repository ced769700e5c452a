// SPDX-License-Identifier: Apache-2.0
#include "sampling/commit_tokens.h"

namespace specops::SPECOPS_ISA {

// token_ids[slots[b], lens[slots[b]] ..] = output_token_ids[b] up to its first -1; lens grows.
// Cost:    batch * max_tokens ids read, at most as many written.
// Assumes: ops.cpp has found room for every token.
// Threads: the caller; a request is a few stores.
void commit_tokens_cpu(const CommitTokensParams& params) {
  for (int64_t batch_idx = 0; batch_idx < params.batch; ++batch_idx) {
    int32_t slot = params.slots[batch_idx];
    if (slot < 0) continue;
    const int32_t* emitted = params.output_token_ids + batch_idx * params.max_tokens;
    int32_t* row = params.token_ids + slot * params.token_ids_stride;
    int32_t len = params.lens[slot];
    for (int64_t i = 0; i < params.max_tokens && emitted[i] >= 0; ++i) row[len++] = emitted[i];
    params.lens[slot] = len;
  }
}

}  // namespace specops::SPECOPS_ISA
