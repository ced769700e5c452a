// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdio>

#include "common/error_sentence.h"

namespace specops {

namespace {

// "op: argument must <rule>, got <got>".
struct Sentence {
  ErrorCode code;
  const char* op;
  const char* argument;
  const char* rule;
  const char* got;  // where the value is not known
};

constexpr Sentence kSentences[] = {
    {ErrorCode::kEmbeddingTokenId,
     "embedding",
     "token_ids",
     "be in [0, vocab)",
     "an id outside"},
    {ErrorCode::kMtpInputTokenId,
     "mtp_input",
     "token_ids and draft_token_ids",
     "be in [0, vocab) where a row takes them",
     "an id outside"},
    {ErrorCode::kMtpInputRows,
     "mtp_input",
     "row_to_request, slots, positions and source_rows",
     "lie within their arrays",
     "a row that differs"},
    {ErrorCode::kRopeSlot,
     "rope_append_kv",
     "cache_slots",
     "be -1 or a slot of the caches",
     "one outside"},
    {ErrorCode::kRopePosition,
     "rope_append_kv",
     "positions",
     "be in [0, max_positions), or -1 where cache_slots is -1",
     "one outside"},
    {ErrorCode::kAttentionPage,
     "append_attention",
     "kv_indices",
     "be in [0, num_pages) where a row sees the page",
     "one outside"},
    {ErrorCode::kAttentionLengths,
     "append_attention",
     "kv_lens",
     "be at least the request's rows and at most the slots of its pages, and qo_indptr and "
     "kv_indptr ascend within their arrays",
     "a request that differs"},
    {ErrorCode::kCompactKvNumAcceptedTokens,
     "compact_kv",
     "num_accepted_tokens",
     "be at least 0 and below the request's rows, and at most the width of accepted_nodes",
     "another number"},
    {ErrorCode::kCompactKvLengths,
     "compact_kv",
     "kv_lens",
     "be at least the request's rows and at most the slots of its pages",
     "a request that differs"},
    {ErrorCode::kCompactKvAcceptedNodes,
     "compact_kv",
     "accepted_nodes",
     "ascend from at least 0 to below rows - 1",
     "others"},
    {ErrorCode::kCompactKvPage,
     "compact_kv",
     "kv_indices",
     "be in [0, num_pages) where a token moves",
     "a page outside"},
    {ErrorCode::kPrepareBatchQoLens,
     "prepare_batch",
     "qo_lens",
     "be at least 0",
     "a length below"},
    {ErrorCode::kPrepareBatchKvLens,
     "prepare_batch",
     "kv_lens",
     "be at least qo_lens (it includes this step's rows)",
     "a length below"},
    {ErrorCode::kPrepareBatchOutputModes,
     "prepare_batch",
     "output_modes",
     "be 0 (none), 1 (last) or 2 (all)",
     "another value"},
    {ErrorCode::kPrepareBatchKvIndptr,
     "prepare_batch",
     "kv_indptr",
     "be non-decreasing from 0 up to the size of kv_indices, and wide enough for the pages of "
     "kv_lens",
     "something else"},
    {ErrorCode::kPrepareBatchKvIndices,
     "prepare_batch",
     "kv_indices",
     "be page ids, at least 0",
     "one below"},
    {ErrorCode::kPrepareBatchTotalRows,
     "prepare_batch",
     "total_rows",
     "be at least the sum of qo_lens",
     "less"},
    {ErrorCode::kPrepareBatchNumOutputRows,
     "prepare_batch",
     "num_output_rows",
     "be at least the output rows asked for",
     "less"},
    {ErrorCode::kPrepareBatchMaxSeqLen,
     "prepare_batch",
     "max_seq_len",
     "be at least the output rows of each request",
     "less"},
    {ErrorCode::kGatherOutputRowsRow,
     "gather_output_rows",
     "output_rows",
     "be -1 or a row of hidden",
     "a row outside"},
    {ErrorCode::kBuildTreeNumDraftTokens,
     "build_tree",
     "num_draft_tokens",
     "be at least 0 and at most the width of parents",
     "another number"},
    {ErrorCode::kBuildTreePositions,
     "build_tree",
     "positions",
     "be at least 0, and an int32 with the depth of every node",
     "another position"},
    {ErrorCode::kBuildTreeParents,
     "build_tree",
     "parents",
     "be -1 or a node before the node's own",
     "another value"},
    {ErrorCode::kPrepareDraftBatchSlots,
     "prepare_draft_batch",
     "slots",
     "be -1 or a row of lens",
     "one outside"},
    {ErrorCode::kPrepareDraftBatchLengths,
     "prepare_draft_batch",
     "kv_lens",
     "be at least the request's rows by qo_indptr, and lens more than its positions before "
     "them",
     "others"},
    {ErrorCode::kPrepareDraftBatchRedraftLens,
     "prepare_draft_batch",
     "redraft_lens",
     "be at least 0, at most window and the positions before the step's",
     "another"},
    {ErrorCode::kPrepareDraftBatchKvIndptr,
     "prepare_draft_batch",
     "kv_indptr",
     "be non-decreasing from 0 up to the size of kv_indices, and wide enough for the pages of "
     "kv_lens",
     "something else"},
    {ErrorCode::kPrepareDraftBatchKvIndices,
     "prepare_draft_batch",
     "kv_indices",
     "be page ids, at least 0",
     "one below"},
    {ErrorCode::kPrepareDraftBatchTotalRows,
     "prepare_draft_batch",
     "total_rows",
     "be at least the rows of all requests",
     "less"},
    {ErrorCode::kAdvanceDraftBatchSlots,
     "advance_draft_batch",
     "slots",
     "be -1 or a row of lens",
     "one outside"},
    {ErrorCode::kAdvanceDraftBatchLens,
     "advance_draft_batch",
     "lens",
     "reach ahead - step positions",
     "less"},
    {ErrorCode::kAdvanceDraftBatchKvIndices,
     "advance_draft_batch",
     "kv_indptr",
     "be within kv_indices, and those page ids, at least 0",
     "others"},
    {ErrorCode::kKeepHiddenRowsSlots,
     "keep_hidden_rows",
     "slots",
     "be -1 or a row of lens",
     "one outside"},
    {ErrorCode::kKeepHiddenRowsLengths,
     "keep_hidden_rows",
     "qo_indptr",
     "be rows of hidden and kv_lens at least as many",
     "others"},
    {ErrorCode::kGatherInputIdsRequest,
     "gather_input_ids",
     "row_to_request",
     "be -1 or below batch",
     "a request outside"},
    {ErrorCode::kGatherInputIdsSlot,
     "gather_input_ids",
     "slots",
     "be a row of lens where the request has rows",
     "one outside"},
    {ErrorCode::kGatherInputIdsLength,
     "gather_input_ids",
     "lens",
     "be in [0, max_len]",
     "a length outside"},
    {ErrorCode::kGatherInputIdsPosition,
     "gather_input_ids",
     "positions",
     "be at least 0 and below lens + k",
     "one outside"},
    {ErrorCode::kGatherInputIdsTokenId,
     "gather_input_ids",
     "token_ids and draft_token_ids",
     "be at least 0 where a row takes them",
     "an id below"},
    {ErrorCode::kCommitSlot, "commit", "slots", "be -1 or a row of token_ids", "one outside"},
    {ErrorCode::kCommitRoom,
     "commit",
     "lens",
     "leave room in token_ids",
     "more tokens than fit"},
    {ErrorCode::kCommitCountedTokens,
     "commit",
     "counted_token_ids",
     "have room for every new token",
     "a row too full"},
    {ErrorCode::kNgramLens, "ngram_propose", "lens", "be in 0 .. max_len", "a length outside"},
    {ErrorCode::kNgramMaxDraftTokens,
     "ngram_propose",
     "max_draft_tokens",
     "be at least 0",
     "a limit below"},
    {ErrorCode::kNgramMinSize,
     "ngram_propose",
     "min_ngram_size",
     "be at least 1",
     "a size below"},
    {ErrorCode::kNgramMaxSize,
     "ngram_propose",
     "max_ngram_size",
     "be at least min_ngram_size",
     "a size below"},
    {ErrorCode::kNgramLeftmost, "ngram_propose", "leftmost", "be 0 or 1", "another number"},
    {ErrorCode::kNgramNumGivenDrafts,
     "ngram_propose",
     "num_given_drafts",
     "be in 0 .. k",
     "a number outside"},
};

struct RuleSentence {
  SamplingRule code;
  const char* argument;
  const char* rule;
  const char* got;
};

constexpr RuleSentence kRules[] = {
    {SamplingRule::kTemperature, "temperature", "be finite and at least 0", "another value"},
    {SamplingRule::kTopK, "top_k", "be at least 1, or 0 or -1 for off", "another value"},
    {SamplingRule::kTopP, "top_p", "be within [0, 1]", "a value outside"},
    {SamplingRule::kMinP, "min_p", "be within [0, 1]", "a value outside"},
    {SamplingRule::kTypicalP, "typical_p", "be within (0, 1]", "a value outside"},
    {SamplingRule::kSeeds,
     "seeds",
     "be given where a temperature is above 0 or a policy is 3 (SYNTHETIC)",
     "None"},
    {SamplingRule::kSlots, "processors.slots", "be -1 or below num_slots", "a slot outside"},
    {SamplingRule::kMaskIndices,
     "processors.mask_indices",
     "be -1 or below num_masks",
     "an index outside"},
    {SamplingRule::kRepetitionPenalty,
     "processors.repetition_penalty",
     "be finite and above 0",
     "another value"},
    {SamplingRule::kPresencePenalty, "processors.presence_penalty", "be finite", "another value"},
    {SamplingRule::kFrequencyPenalty, "processors.frequency_penalty", "be finite", "another value"},
    {SamplingRule::kTokenIds,
     "processors.token_ids",
     "be as wide as the tokens before each position",
     "fewer"},
    {SamplingRule::kOutputIndptr,
     "output_indptr",
     "be ascending from 0 by at most k + 1 and at most num_output_rows",
     "another value"},
    {SamplingRule::kParents,
     "parents",
     "be at least -1 and below the node itself",
     "a parent outside"},
    {SamplingRule::kStrategy,
     "strategy",
     "be 0 (GREEDY), 1 (TARGET_MATCH), 2 (REJECTION), 3 (BLOCK) or 4 (TOPP)",
     "another value"},
    {SamplingRule::kTreeStrategy,
     "strategy",
     "be 0 (GREEDY), 1 (TARGET_MATCH) or 2 (REJECTION) where parents are given",
     "another value"},
    {SamplingRule::kPolicy,
     "policy",
     "be 0 (NORMAL), 1 (ACCEPT_ALL), 2 (REJECT_ALL) or 3 (SYNTHETIC)",
     "another value"},
    {SamplingRule::kTreePolicy,
     "policy",
     "be 0 (NORMAL) or 2 (REJECT_ALL) where parents are given",
     "another value"},
    {SamplingRule::kNoAcceptRates,
     "accept_rates",
     "be given where a policy is 3 (SYNTHETIC)",
     "None"},
    {SamplingRule::kAcceptRates,
     "accept_rates",
     "be within [0, 1] where the policy is 3 (SYNTHETIC)",
     "a value outside"},
    {SamplingRule::kDraftProbRows,
     "draft_prob_rows",
     "be -1 or below the rows of draft_probs",
     "a row outside"},
    {SamplingRule::kDraftProbTokenIds,
     "draft_prob_token_ids",
     "be -1 or below vocab_size",
     "an id outside"},
};

const char* op_name(SamplingOp op) {
  switch (op) {
    case SamplingOp::kSample:
      return "sample";
    case SamplingOp::kVerify:
      return "verify";
    case SamplingOp::kTopLogprobs:
      return "top_logprobs";
  }
  return nullptr;
}

// The op is nullptr where there is no such code.
Sentence find_sentence(int32_t code) {
  for (const Sentence& sentence : kSentences) {
    if (static_cast<int32_t>(sentence.code) == code) return sentence;
  }
  constexpr int32_t kRulesOfAnOp = 100;
  const char* op = op_name(static_cast<SamplingOp>(code - code % kRulesOfAnOp));
  for (const RuleSentence& rule : kRules) {
    if (static_cast<int32_t>(rule.code) == code % kRulesOfAnOp) {
      return {static_cast<ErrorCode>(code), op, rule.argument, rule.rule, rule.got};
    }
  }
  return {ErrorCode::kNone, nullptr, nullptr, nullptr, nullptr};
}

std::string number(double value) {
  constexpr double kExact = 9007199254740992.0;  // whole numbers up to it are themselves
  if (value == std::floor(value) && std::fabs(value) < kExact) {
    return std::to_string(static_cast<int64_t>(value));
  }
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

}  // namespace

std::string error_sentence(int32_t code) {
  return error_sentence(Fault{.code = static_cast<ErrorCode>(code)});
}

std::string error_sentence(const Fault& fault) {
  Sentence sentence = find_sentence(static_cast<int32_t>(fault.code));
  if (sentence.op == nullptr) return {};
  std::string out = std::string(sentence.op) + ": " + sentence.argument;
  if (fault.i >= 0) out += "[" + std::to_string(fault.i);
  if (fault.j >= 0) out += ", " + std::to_string(fault.j);
  if (fault.i >= 0) out += "]";
  out += std::string(" must ") + sentence.rule;
  if (fault.limit >= 0) out += " = " + std::to_string(fault.limit);
  return out + ", got " + (fault.has_value ? number(fault.value) : sentence.got);
}

#if !defined(SPECOPS_CUDA) && !defined(SPECOPS_SIMT)
ErrorFlag error_flag(int /*device*/) { return {}; }
int32_t take_error_sync(int /*device*/) { return 0; }
#endif

}  // namespace specops
