// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdio>

#include "common/error_sentence.h"

namespace specops {

namespace {

// Sentence templates, complete when only the code is known. For a fault with a known value, the
// element is inserted after the argument, the value replaces the text after "got", and the limits
// replace the # signs in order. Text in braces appears only if its limit is known.

const char* sentence_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kNone:
      break;

    case ErrorCode::kEmbeddingTokenId:
      return "embedding: token_ids must be in [0, vocab{=#}), got an id outside";
    case ErrorCode::kMtpInputRequest:
      return "mtp_input: row_to_request must be -1 or below batch{ = #}, got a request outside";
    case ErrorCode::kMtpInputSlot:
      return "mtp_input: slots must be a row of lens{, below #}, where the request has rows, got "
             "one outside";
    case ErrorCode::kMtpInputLength:
      return "mtp_input: lens must be at least 0 and at most max_len{ = #}, got a length outside";
    case ErrorCode::kMtpInputPosition:
      return "mtp_input: positions must be at least 0, got one below";
    case ErrorCode::kMtpInputSourceRow:
      return "mtp_input: source_rows must be a row of hidden{, below #}, or -2 - a row of "
             "kept{, of #}, got one outside";
    case ErrorCode::kMtpInputTokenId:
      return "mtp_input: token_ids must be -1 or in [0, vocab{ = #}) where a row takes them, got "
             "an id outside";
    case ErrorCode::kMtpInputDraftTokenId:
      return "mtp_input: draft_token_ids must be -1 or in [0, vocab{ = #}) where a row takes "
             "them, got an id outside";
    case ErrorCode::kLinearWorkspace:
      return "linear: workspace must begin with 128 zeros, which every call leaves there, and "
             "serve "
             "one stream at a time, got a counter with too many arrivals";
    case ErrorCode::kLinearInputOrder:
      return "linear: weight.input_order must be an input of x{, below #}, got one outside";

    case ErrorCode::kRopeSlot:
      return "rope_append_kv: cache_slots must be -1 or in [0, num_pages * page_size{=#}), got "
             "one outside";
    case ErrorCode::kRopePosition:
      return "rope_append_kv: positions must be in [0, max_positions{=#}), or -1 where "
             "cache_slots is -1, got one outside";
    case ErrorCode::kAttentionQoIndptr:
      return "append_attention: qo_indptr must be non-decreasing from 0, at least the entry "
             "before it{ = #} and at most the rows of q{ = #}, got one outside";
    case ErrorCode::kAttentionKvIndptr:
      return "append_attention: kv_indptr must be non-decreasing from 0, at least the entry "
             "before it{ = #} and at most the size of kv_indices{ = #}, got one outside";
    case ErrorCode::kAttentionKvLens:
      return "append_attention: kv_lens must be at least the request's rows{=#} and at most the "
             "slots of its pages{=#}, got a length outside";
    case ErrorCode::kAttentionPage:
      return "append_attention: kv_indices must be in [0, num_pages{=#}) where a row sees the "
             "page, got one outside";
    case ErrorCode::kCompactKvNumAcceptedTokens:
      return "compact_kv: num_accepted_tokens must be at least 0, below the request's rows{=#} "
             "and at most the width of accepted_nodes{=#}, got another number";
    case ErrorCode::kCompactKvKvIndptr:
      return "compact_kv: kv_indptr must be non-decreasing from 0, at least the entry before "
             "it{ = #} and at most the size of kv_indices{=#}, got one outside";
    case ErrorCode::kCompactKvKvLens:
      return "compact_kv: kv_lens must be at least the request's rows{=#} and at most the slots "
             "of its pages{=#}, got a length outside";
    case ErrorCode::kCompactKvAcceptedNodes:
      return "compact_kv: accepted_nodes must be ascending in [0, rows - 1){, here in [#}{, #)}, "
             "got others";
    case ErrorCode::kCompactKvPage:
      return "compact_kv: kv_indices must be in [0, num_pages{=#}) where a token moves, got a "
             "page outside";
    case ErrorCode::kCopyKvFromSlots:
      return "copy_kv: from_slots must be in [0, num_pages * page_size{ = #}) where a token is "
             "copied, got a slot outside";
    case ErrorCode::kCopyKvToSlots:
      return "copy_kv: to_slots must be -1 or below num_pages * page_size{ = #}, got a slot "
             "outside";
    case ErrorCode::kLatentSlot:
      return "rope_append_latent: cache_slots must be -1 or in [0, num_pages * page_size{=#}), got "
             "one outside";
    case ErrorCode::kLatentPosition:
      return "rope_append_latent: positions must be in [0, max_positions{=#}), or -1 where "
             "cache_slots is -1, got one outside";
    case ErrorCode::kAttentionWorkspace:
      return "append_attention: workspace must begin with zeros, which every call leaves there, "
             "and "
             "serve one stream at a time, got a counter with too many arrivals";

    case ErrorCode::kPrepareBatchQoLens:
      return "prepare_batch: qo_lens must be at least 0, got a length below";
    case ErrorCode::kPrepareBatchKvLens:
      return "prepare_batch: kv_lens must be at least qo_lens{[#]}{ = #} (it includes this "
             "step's rows), got a length below";
    case ErrorCode::kPrepareBatchOutputModes:
      return "prepare_batch: output_modes must be 0 (none), 1 (last) or 2 (all), got another "
             "value";
    case ErrorCode::kPrepareBatchKvIndptr:
      return "prepare_batch: kv_indptr must be non-decreasing from 0, at least the entry before "
             "it{ = #} and at most the size of kv_indices{ = #}, got one outside";
    case ErrorCode::kPrepareBatchPages:
      return "prepare_batch: kv_indptr must be wide enough for the pages of "
             "kv_lens{ = #}{, which end at #}, got less";
    case ErrorCode::kPrepareBatchKvIndices:
      return "prepare_batch: kv_indices must be a page id, at least 0, got one below";
    case ErrorCode::kPrepareBatchTotalRows:
      return "prepare_batch: total_rows must be at least {#, }the sum of qo_lens, got less";
    case ErrorCode::kPrepareBatchNumOutputRows:
      return "prepare_batch: num_output_rows must be at least {#, }the output rows asked for, "
             "got less";
    case ErrorCode::kPrepareBatchMaxSeqLen:
      return "prepare_batch: max_seq_len must be at least the {# }output rows of each "
             "request{, as of request #}, got less";
    case ErrorCode::kGatherInputIdsRequest:
      return "gather_input_ids: row_to_request must be -1 or below batch{ = #}, got a request "
             "outside";
    case ErrorCode::kGatherInputIdsSlot:
      return "gather_input_ids: slots must be a row of lens{, below #}, where the request has "
             "rows, got one outside";
    case ErrorCode::kGatherInputIdsLength:
      return "gather_input_ids: lens must be at least 0 and at most max_len{ = #}, got a length "
             "outside";
    case ErrorCode::kGatherInputIdsPosition:
      return "gather_input_ids: positions must be at least 0 and below lens{[#]} + k{ = #}, got "
             "one outside";
    case ErrorCode::kGatherInputIdsTokenId:
      return "gather_input_ids: token_ids must be a token id, at least 0, where a row takes "
             "it{, as positions[#] does}, got one below";
    case ErrorCode::kGatherInputIdsDraftTokenId:
      return "gather_input_ids: draft_token_ids must be a token id, at least 0, where a row "
             "takes it{, as positions[#] does}, got one below";
    case ErrorCode::kGatherOutputRowsRow:
      return "gather_output_rows: output_rows must be -1 or a row of hidden{, below #}, got a "
             "row outside";
    case ErrorCode::kBuildTreeNumDraftTokens:
      return "build_tree: num_draft_tokens must be at least 0 and at most the width of "
             "parents{, #}, got another number";
    case ErrorCode::kBuildTreePositions:
      return "build_tree: positions must be at least 0, and an int32 with the depth of every "
             "node, got another position";
    case ErrorCode::kBuildTreeParents:
      return "build_tree: parents must be -1 or a node before the node itself, got another value";
    case ErrorCode::kPrepareDraftBatchSlots:
      return "prepare_draft_batch: slots must be -1 or a row of lens{, below #}, got one outside";
    case ErrorCode::kPrepareDraftBatchQoIndptr:
      return "prepare_draft_batch: qo_indptr must be non-decreasing from 0, at least the entry "
             "before it{ = #}, got one below";
    case ErrorCode::kPrepareDraftBatchKvLens:
      return "prepare_draft_batch: kv_lens must be at least the request's {# }rows by qo_indptr, "
             "got less";
    case ErrorCode::kPrepareDraftBatchLens:
      return "prepare_draft_batch: lens must be more than the {# }positions before the step's, "
             "got no more";
    case ErrorCode::kPrepareDraftBatchRedraftLens:
      return "prepare_draft_batch: redraft_lens must be at least 0, at most window{ = #} and the "
             "{# }positions before the step's, got another";
    case ErrorCode::kPrepareDraftBatchKvIndptr:
      return "prepare_draft_batch: kv_indptr must be non-decreasing from 0, at least the entry "
             "before it{ = #} and at most the size of kv_indices{ = #}, got one outside";
    case ErrorCode::kPrepareDraftBatchPages:
      return "prepare_draft_batch: kv_indptr must be wide enough for the pages of the "
             "{# }positions up to the last row's{, which end at #}, got less";
    case ErrorCode::kPrepareDraftBatchKvIndices:
      return "prepare_draft_batch: kv_indices must be a page id, at least 0, got one below";
    case ErrorCode::kPrepareDraftBatchTotalRows:
      return "prepare_draft_batch: total_rows must be at least {#, }the rows of all requests, "
             "got less";
    case ErrorCode::kAdvanceDraftBatchSlots:
      return "advance_draft_batch: slots must be -1 or a row of lens{, below #}, got one outside";
    case ErrorCode::kAdvanceDraftBatchLens:
      return "advance_draft_batch: lens must be at least ahead - step{ = #}, got less";
    case ErrorCode::kAdvanceDraftBatchKvIndptr:
      return "advance_draft_batch: kv_indptr must be non-decreasing from 0, at least the entry "
             "before it{ = #} and at most the size of kv_indices{ = #}, got one outside";
    case ErrorCode::kAdvanceDraftBatchKvIndices:
      return "advance_draft_batch: kv_indices must be a page id, at least 0, got one below";
    case ErrorCode::kKeepHiddenRowsSlots:
      return "keep_hidden_rows: slots must be -1 or a row of lens{, below #}, got one outside";
    case ErrorCode::kKeepHiddenRowsQoIndptr:
      return "keep_hidden_rows: qo_indptr must be non-decreasing from 0, at least the entry "
             "before it{ = #} and at most the rows of hidden{, #}, got one outside";
    case ErrorCode::kKeepHiddenRowsKvLens:
      return "keep_hidden_rows: kv_lens must be at least the request's {# }rows by qo_indptr, "
             "got less";

    case ErrorCode::kCommitSlot:
      return "commit: slots must be -1 or below num_slots{ = #}, got one outside";
    case ErrorCode::kCommitSlotTaken:
      return "commit: slots must be of no other request, got one again";
    case ErrorCode::kCommitRoom:
      return "commit: lens must be at least 0, with room for the {# }new tokens below "
             "max_len{ = #}, got more than fit";
    case ErrorCode::kCommitCountedTokens:
      return "commit: counts.counted_token_ids must be few enough to leave room for the {# }new "
             "ones{ in a width of #}, got a row too full";

    case ErrorCode::kNgramLens:
      return "ngram_propose: lens must be in 0 .. max_len{ = #}, got a length outside";
    case ErrorCode::kNgramMaxDraftTokens:
      return "ngram_propose: max_draft_tokens must be at least 0, got a limit below";
    case ErrorCode::kNgramMinSize:
      return "ngram_propose: min_ngram_size must be at least 1, got a size below";
    case ErrorCode::kNgramMaxSize:
      return "ngram_propose: max_ngram_size must be at least min_ngram_size{ = #}, got a size "
             "below";
    case ErrorCode::kNgramLeftmost:
      return "ngram_propose: leftmost must be 0 or 1, got another number";
    case ErrorCode::kNgramNumGivenDrafts:
      return "ngram_propose: num_given_drafts must be in 0 .. k{ = #}, got a number outside";

    case ErrorCode::kMoeSortExpertIds:
      return "moe_sort: expert_ids must be -1 or below num_experts{ = #}, got an id outside";
    case ErrorCode::kMoeLinearExpertIndptr:
      return "moe_linear: expert_indptr must be non-decreasing from 0, at least the entry before "
             "it{ = #} and at most the rows of out{ = #}, got one outside";
    case ErrorCode::kMoeLinearRowIndices:
      return "moe_linear: row_indices must be a row of x{, below #}, where an expert has it, got "
             "one outside";
    case ErrorCode::kMoeCombinePlaces:
      return "moe_combine: places must be -1 or a row of expert_out{, below #}, got one outside";

    case ErrorCode::kCausalConv1dSlots:
      return "causal_conv1d: slots must be -1 or a slot of states{, below #}, got one outside";
    case ErrorCode::kCausalConv1dQoIndptr:
      return "causal_conv1d: qo_indptr must be non-decreasing from 0, at least the entry "
             "before it{ = #} and at most the rows of x{, #}, got one outside";
    case ErrorCode::kCausalConv1dKvLens:
      return "causal_conv1d: kv_lens must be at least the request's {# }rows by qo_indptr, "
             "got less";
    case ErrorCode::kGatedDeltaRuleSlots:
      return "gated_delta_rule: slots must be -1 or a slot of states{, below #}, got one outside";
    case ErrorCode::kGatedDeltaRuleQoIndptr:
      return "gated_delta_rule: qo_indptr must be non-decreasing from 0, at least the entry "
             "before it{ = #} and at most the rows of q{, #}, got one outside";
    case ErrorCode::kGatedDeltaRuleKvLens:
      return "gated_delta_rule: kv_lens must be at least the request's {# }rows by qo_indptr, "
             "got less";
  }
  return nullptr;
}

// Returns the sentence without the op's name, which the caller prepends.
const char* sentence_of(SamplingRule rule) {
  switch (rule) {
    case SamplingRule::kTemperature:
      return "sampling.temperature must be finite and at least 0, got another value";
    case SamplingRule::kTopK:
      return "sampling.top_k must be at least 1, or 0 or -1 for off, got another value";
    case SamplingRule::kTopP:
      return "sampling.top_p must be within [0, 1], got a value outside";
    case SamplingRule::kMinP:
      return "sampling.min_p must be within [0, 1], got a value outside";
    case SamplingRule::kTypicalP:
      return "sampling.typical_p must be within (0, 1], got a value outside";
    case SamplingRule::kSeeds:
      return "sampling.seeds must be given where a temperature is above 0 or a policy is 3 "
             "(SYNTHETIC), "
             "got None";
    case SamplingRule::kSlots:
      return "processors.slots must be -1 or below num_slots{ = #}, got a slot outside";
    case SamplingRule::kMaskIndices:
      return "processors.mask_indices must be -1 or below num_masks{ = #}, got an index outside";
    case SamplingRule::kRepetitionPenalty:
      return "processors.repetition_penalty must be finite and above 0, got another value";
    case SamplingRule::kPresencePenalty:
      return "processors.presence_penalty must be finite, got another value";
    case SamplingRule::kFrequencyPenalty:
      return "processors.frequency_penalty must be finite, got another value";
    case SamplingRule::kTokenIds:
      return "processors.token_ids must be as wide as the tokens before each position, got fewer";
    case SamplingRule::kOutputIndptr:
      return "drafts.output_indptr must be ascending from 0 by at most k + 1 and at most "
             "num_output_rows, got another value";
    case SamplingRule::kParents:
      return "drafts.parents must be at least -1 and below the node itself, got a parent outside";
    case SamplingRule::kStrategy:
      return "strategy must be 0 (GREEDY), 1 (TARGET_MATCH), 2 (REJECTION), 3 (BLOCK) or 4 "
             "(TOPP), got another value";
    case SamplingRule::kTreeStrategy:
      return "strategy must be 0 (GREEDY), 1 (TARGET_MATCH) or 2 (REJECTION) where parents are "
             "given, got another value";
    case SamplingRule::kPolicy:
      return "policy must be 0 (NORMAL), 1 (ACCEPT_ALL), 2 (REJECT_ALL) or 3 (SYNTHETIC), got "
             "another value";
    case SamplingRule::kTreePolicy:
      return "policy must be 0 (NORMAL) or 2 (REJECT_ALL) where parents are given, got another "
             "value";
    case SamplingRule::kNoAcceptRates:
      return "accept_rates must be given where a policy is 3 (SYNTHETIC), got None";
    case SamplingRule::kAcceptRates:
      return "accept_rates must be within [0, 1] where the policy is 3 (SYNTHETIC), got a value "
             "outside";
    case SamplingRule::kDraftProbRows:
      return "draft_probs.rows must be -1 or below the rows of draft_probs.probs{ = #}, got a row "
             "outside";
    case SamplingRule::kDraftProbTokenIds:
      return "draft_probs.token_ids must be -1 or below vocab_size{ = #}, got an id outside";
  }
  return nullptr;
}

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

// Returns the sentence of a code, without limits; empty if there is no such code.
std::string find_sentence(ErrorCode code) {
  if (const char* sentence = sentence_of(code)) return sentence;
  constexpr int32_t kRulesOfAnOp = 100;
  int32_t rule = static_cast<int32_t>(code) % kRulesOfAnOp;
  const char* op = op_name(static_cast<SamplingOp>(static_cast<int32_t>(code) - rule));
  const char* sentence = sentence_of(static_cast<SamplingRule>(rule));
  if (op == nullptr || sentence == nullptr) return {};
  return std::string(op) + ": " + sentence;
}

// Fills in the braces of a sentence with the limits of the fault, or drops them.
std::string with_limits(const std::string& sentence, const Fault& fault) {
  int64_t limit = fault.limit;
  std::string out;
  size_t end = 0;
  for (size_t begin; (begin = sentence.find('{', end)) != std::string::npos;) {
    out += sentence.substr(end, begin - end);
    size_t place = sentence.find('#', begin);
    end = sentence.find('}', begin) + 1;
    if (limit >= 0) {
      out += sentence.substr(begin + 1, place - begin - 1) + std::to_string(limit);
      out += sentence.substr(place + 1, end - place - 2);
    }
    limit = fault.limit2;
  }
  return out + sentence.substr(end);
}

std::string number(double value) {
  constexpr double kExact = 9007199254740992.0;  // whole numbers up to this are exact
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
  std::string out = with_limits(find_sentence(fault.code), fault);
  if (out.empty() || !fault.has_value) return out;
  const std::string kGot = ", got ";
  out.replace(out.rfind(kGot) + kGot.size(), std::string::npos, number(fault.value));
  if (fault.i < 0) return out;
  std::string element = "[" + std::to_string(fault.i);
  if (fault.j >= 0) element += ", " + std::to_string(fault.j);
  return out.insert(out.find(" must "), element + "]");
}

// Substitutes for modules without CUDA kernels; error_flag.cu overrides them.
__attribute__((weak)) CudaKernels cuda_kernels() { return CudaKernels::kNone; }
__attribute__((weak)) ErrorFlag error_flag(int /*device*/) { return {}; }
__attribute__((weak)) int32_t take_error_sync(int /*device*/) { return 0; }

}  // namespace specops
