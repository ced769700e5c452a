// SPDX-License-Identifier: Apache-2.0
#include "common/error_flag.h"

namespace specops {

const char* error_sentence(int32_t code) {
  switch (static_cast<ErrorCode>(code)) {
    case ErrorCode::kNone:
      break;
    case ErrorCode::kEmbeddingTokenId:
      return "embedding: token_ids must be in [0, vocab), got an id outside";
    case ErrorCode::kCommitTokensSlot:
      return "commit_tokens: slots must be -1 or a row of token_ids, got one outside";
    case ErrorCode::kCommitTokensRoom:
      return "commit_tokens: lens must leave room in token_ids, got more tokens than fit";
  }
  return nullptr;
}

#if !defined(SPECOPS_CUDA) && !defined(SPECOPS_SIMT)
ErrorFlag error_flag(int /*device*/) { return {}; }
int32_t take_error_sync(int /*device*/) { return 0; }
#endif

}  // namespace specops
