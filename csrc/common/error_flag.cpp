// SPDX-License-Identifier: Apache-2.0
#include "common/error_flag.h"

namespace specops {

const char* error_sentence(int32_t code) {
  switch (static_cast<ErrorCode>(code)) {
    case ErrorCode::kNone:
      break;
    case ErrorCode::kEmbeddingTokenId:
      return "embedding: token_ids must be in [0, vocab), got an id outside";
    case ErrorCode::kMtpInputTokenId:
      return "mtp_input: token_ids and draft_token_ids must be in [0, vocab) where a row takes "
             "them, got an id outside";
    case ErrorCode::kMtpInputRows:
      return "mtp_input: row_to_request, slots, positions and source_rows must lie within their "
             "arrays, got a row that differs";
    case ErrorCode::kRopeSlot:
      return "rope_append_kv: cache_slots must be -1 or a slot of the caches, got one outside";
    case ErrorCode::kRopePosition:
      return "rope_append_kv: positions must be in [0, max_positions), or -1 where cache_slots is "
             "-1, got one outside";
    case ErrorCode::kAttentionPage:
      return "append_attention: kv_indices must be in [0, num_pages) where a row sees the page, "
             "got "
             "one outside";
    case ErrorCode::kAttentionLengths:
      return "append_attention: kv_lens must be at least the request's rows and at most the slots "
             "of "
             "its pages, and qo_indptr and kv_indptr ascend within their arrays, got a request "
             "that "
             "differs";

    case ErrorCode::kCompactKvNumAcceptedTokens:
      return "compact_kv: num_accepted_tokens must be at least 0 and below the request's rows, and "
             "at most the width of accepted_nodes, got another number";
    case ErrorCode::kCompactKvLengths:
      return "compact_kv: kv_lens must be at least the request's rows and at most the slots of its "
             "pages, got a request that differs";
    case ErrorCode::kCompactKvAcceptedNodes:
      return "compact_kv: accepted_nodes must ascend from at least 0 to below rows - 1, got others";
    case ErrorCode::kCompactKvPage:
      return "compact_kv: kv_indices must be in [0, num_pages) where a token moves, got a page "
             "outside";

    case ErrorCode::kPrepareBatchQoLens:
      return "prepare_batch: qo_lens must be at least 0, got a length below";
    case ErrorCode::kPrepareBatchKvLens:
      return "prepare_batch: kv_lens must be at least qo_lens (it includes this step's rows), got "
             "a length below";
    case ErrorCode::kPrepareBatchOutputModes:
      return "prepare_batch: output_modes must be 0 (none), 1 (last) or 2 (all), got another value";
    case ErrorCode::kPrepareBatchKvIndptr:
      return "prepare_batch: kv_indptr must be non-decreasing from 0 up to the size of kv_indices, "
             "and wide enough for the pages of kv_lens, got something else";
    case ErrorCode::kPrepareBatchKvIndices:
      return "prepare_batch: kv_indices must be page ids, at least 0, got one below";
    case ErrorCode::kPrepareBatchTotalRows:
      return "prepare_batch: total_rows must be at least the sum of qo_lens, got less";
    case ErrorCode::kPrepareBatchNumOutputRows:
      return "prepare_batch: num_output_rows must be at least the output rows asked for, got less";
    case ErrorCode::kPrepareBatchMaxSeqLen:
      return "prepare_batch: max_seq_len must be at least the output rows of each request, got "
             "less";
    case ErrorCode::kGatherOutputRowsRow:
      return "gather_output_rows: output_rows must be -1 or a row of hidden, got a row outside";
    case ErrorCode::kBuildTreeNumDraftTokens:
      return "build_tree: num_draft_tokens must be at least 0 and at most the width of parents, "
             "got "
             "another number";
    case ErrorCode::kBuildTreePositions:
      return "build_tree: positions must be at least 0, and an int32 with the depth of every node, "
             "got another position";
    case ErrorCode::kBuildTreeParents:
      return "build_tree: parents must be -1 or a node before the node's own, got another value";
    case ErrorCode::kPrepareDraftBatchSlots:
      return "prepare_draft_batch: slots must be -1 or a row of lens, got one outside";
    case ErrorCode::kPrepareDraftBatchLengths:
      return "prepare_draft_batch: kv_lens must be at least the request's rows by qo_indptr, and "
             "lens more than its positions before them, got others";
    case ErrorCode::kPrepareDraftBatchRedraftLens:
      return "prepare_draft_batch: redraft_lens must be at least 0, at most window and the "
             "positions before the step's, got another";
    case ErrorCode::kPrepareDraftBatchKvIndptr:
      return "prepare_draft_batch: kv_indptr must be non-decreasing from 0 up to the size of "
             "kv_indices, and wide enough for the pages of kv_lens, got something else";
    case ErrorCode::kPrepareDraftBatchKvIndices:
      return "prepare_draft_batch: kv_indices must be page ids, at least 0, got one below";
    case ErrorCode::kPrepareDraftBatchTotalRows:
      return "prepare_draft_batch: total_rows must be at least the rows of all requests, got less";
    case ErrorCode::kAdvanceDraftBatchSlots:
      return "advance_draft_batch: slots must be -1 or a row of lens, got one outside";
    case ErrorCode::kAdvanceDraftBatchLens:
      return "advance_draft_batch: lens must reach ahead - step positions, got less";
    case ErrorCode::kAdvanceDraftBatchKvIndices:
      return "advance_draft_batch: kv_indptr must be within kv_indices, and those page ids, at "
             "least 0, got others";
    case ErrorCode::kKeepHiddenRowsSlots:
      return "keep_hidden_rows: slots must be -1 or a row of lens, got one outside";
    case ErrorCode::kKeepHiddenRowsLengths:
      return "keep_hidden_rows: qo_indptr must be rows of hidden and kv_lens at least as many, got "
             "others";
    case ErrorCode::kGatherInputIdsRequest:
      return "gather_input_ids: row_to_request must be -1 or below batch, got a request outside";
    case ErrorCode::kGatherInputIdsSlot:
      return "gather_input_ids: slots must be a row of lens where the request has rows, got one "
             "outside";
    case ErrorCode::kGatherInputIdsLength:
      return "gather_input_ids: lens must be in [0, max_len], got a length outside";
    case ErrorCode::kGatherInputIdsPosition:
      return "gather_input_ids: positions must be at least 0 and below lens + k, got one outside";
    case ErrorCode::kGatherInputIdsTokenId:
      return "gather_input_ids: token_ids and draft_token_ids must be at least 0 where a row takes "
             "them, got an id below";

    case ErrorCode::kCommitSlot:
      return "commit: slots must be -1 or a row of token_ids, got one outside";
    case ErrorCode::kCommitRoom:
      return "commit: lens must leave room in token_ids, got more tokens than fit";
    case ErrorCode::kCommitCountedTokens:
      return "commit: counted_token_ids must have room for every new token, got a row too full";
    case ErrorCode::kSampleTemperature:
      return "sample: temperature must be finite and at least 0, got another value";
    case ErrorCode::kSampleTopK:
      return "sample: top_k must be at least 1, or 0 or -1 for off, got another value";
    case ErrorCode::kSampleTopP:
      return "sample: top_p must be within [0, 1], got a value outside";
    case ErrorCode::kSampleMinP:
      return "sample: min_p must be within [0, 1], got a value outside";
    case ErrorCode::kVerifyTemperature:
      return "verify: temperature must be finite and at least 0, got another value";
    case ErrorCode::kVerifyTopK:
      return "verify: top_k must be at least 1, or 0 or -1 for off, got another value";
    case ErrorCode::kVerifyTopP:
      return "verify: top_p must be within [0, 1], got a value outside";
    case ErrorCode::kVerifyMinP:
      return "verify: min_p must be within [0, 1], got a value outside";
    case ErrorCode::kVerifyOutputIndptr:
      return "verify: output_indptr must be ascending from 0 by at most k + 1 and at most "
             "num_output_rows, got other values";
    case ErrorCode::kVerifyStrategy:
      return "verify: strategy must be 0 (GREEDY), 1 (TARGET_MATCH), 2 (REJECTION), 3 (BLOCK) or 4 "
             "(TOPP), got another value";
    case ErrorCode::kVerifyTreeStrategy:
      return "verify: strategy must be 0 (GREEDY), 1 (TARGET_MATCH) or 2 (REJECTION) where parents "
             "are given, got another value";
    case ErrorCode::kVerifyPolicy:
      return "verify: policy must be 0 (NORMAL), 1 (ACCEPT_ALL), 2 (REJECT_ALL) or 3 "
             "(SYNTHETIC), got another value";
    case ErrorCode::kVerifyTreePolicy:
      return "verify: policy must be 0 (NORMAL) or 2 (REJECT_ALL) where parents are given, got "
             "another value";
    case ErrorCode::kVerifyNoAcceptRates:
      return "verify: accept_rates must be given where a policy is 3 (SYNTHETIC), got None";

    case ErrorCode::kSampleSeeds:
      return "sample: seeds must be given where a temperature is above 0, got None";
    case ErrorCode::kVerifySeeds:
      return "verify: seeds must be given where a temperature is above 0 or a policy is 3 "
             "(SYNTHETIC), got None";
    case ErrorCode::kSampleTypicalP:
      return "sample: typical_p must be within (0, 1], got a value outside";
    case ErrorCode::kSampleSlots:
      return "sample: processors.slots must be -1 or below num_slots, got a slot outside";
    case ErrorCode::kSampleMaskIndices:
      return "sample: processors.mask_indices must be -1 or below num_masks, got an index outside";
    case ErrorCode::kSamplePenalties:
      return "sample: processors.repetition_penalty must be finite and above 0, presence_penalty "
             "and "
             "frequency_penalty finite, got another value";
    case ErrorCode::kSampleTokenIds:
      return "sample: processors.token_ids must be as wide as the tokens before a position, got "
             "fewer";
    case ErrorCode::kVerifyTokenIds:
      return "verify: processors.token_ids must be as wide as the tokens before a position, got "
             "fewer";
    case ErrorCode::kVerifyTypicalP:
      return "verify: typical_p must be within (0, 1], got a value outside";
    case ErrorCode::kVerifySlots:
      return "verify: processors.slots must be -1 or below num_slots, got a slot outside";
    case ErrorCode::kVerifyMaskIndices:
      return "verify: processors.mask_indices must be -1 or below num_masks, got an index outside";
    case ErrorCode::kVerifyPenalties:
      return "verify: processors.repetition_penalty must be finite and above 0, presence_penalty "
             "and "
             "frequency_penalty finite, got another value";
    case ErrorCode::kVerifyAcceptRates:
      return "verify: accept_rates must be within [0, 1] where policy is 3 (SYNTHETIC), got a "
             "value "
             "outside";
    case ErrorCode::kVerifyParents:
      return "verify: parents must be at least -1 and below the node itself, got a parent outside";
    case ErrorCode::kVerifyDraftProbTokenIds:
      return "verify: draft_prob_token_ids must be -1 or below vocab_size, got an id outside";
    case ErrorCode::kVerifyDraftProbRows:
      return "verify: draft_prob_rows must be -1 or a row of draft_probs, got a row outside";
    case ErrorCode::kTopLogprobsParameters:
      return "top_logprobs: output_indptr, parents, filters and processors must "
             "be "
             "as verify takes them, got another value";

    case ErrorCode::kNgramLens:
      return "ngram_propose: lens must be in 0 .. max_len, got a length outside";
    case ErrorCode::kNgramMaxDraftTokens:
      return "ngram_propose: max_draft_tokens must be at least 0, got a limit below";
    case ErrorCode::kNgramMinSize:
      return "ngram_propose: min_ngram_size must be at least 1, got a size below";
    case ErrorCode::kNgramMaxSize:
      return "ngram_propose: max_ngram_size must be at least min_ngram_size, got a size below";
    case ErrorCode::kNgramLeftmost:
      return "ngram_propose: leftmost must be 0 or 1, got another number";
    case ErrorCode::kNgramNumGivenDrafts:
      return "ngram_propose: num_given_drafts must be in 0 .. k, got a number outside";
  }
  return nullptr;
}

#if !defined(SPECOPS_CUDA) && !defined(SPECOPS_SIMT)
ErrorFlag error_flag(int /*device*/) { return {}; }
int32_t take_error_sync(int /*device*/) { return 0; }
#endif

}  // namespace specops
