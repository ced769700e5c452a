// SPDX-License-Identifier: Apache-2.0
// Error reporting of CUDA kernels for invalid tensor data: one int32 per device, 0 = no error. The
// first error wins; the invalid row is skipped. Plain C++; report_error() is in device.cuh.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/host_device.h"

namespace specops {

// An error code is its family's base plus the number of a rule in the family.
constexpr int32_t kDenseCodes = 1000;
constexpr int32_t kAttentionCodes = 2000;
constexpr int32_t kBatchingCodes = 3000;
constexpr int32_t kSamplingCodes = 4000;
constexpr int32_t kSuffixTreeCodes = 5000;
constexpr int32_t kMoeCodes = 6000;
constexpr int32_t kLinearAttentionCodes = 7000;

// Stored as int32; each code has its sentence in error_flag.cpp. Rules that several ops of the
// sampling family share are SamplingRules, below.
enum class ErrorCode : int32_t {
  kNone = 0,

  // dense
  kEmbeddingTokenId = kDenseCodes + 1,
  kMtpInputRequest = kDenseCodes + 2,
  kMtpInputSlot = kDenseCodes + 3,
  kMtpInputLength = kDenseCodes + 4,
  kMtpInputPosition = kDenseCodes + 5,
  kMtpInputSourceRow = kDenseCodes + 6,
  kMtpInputTokenId = kDenseCodes + 7,
  kMtpInputDraftTokenId = kDenseCodes + 8,
  kLinearWorkspace = kDenseCodes + 9,
  kLinearInputOrder = kDenseCodes + 10,

  // attention
  kRopeSlot = kAttentionCodes + 1,
  kRopePosition = kAttentionCodes + 2,
  kAttentionQoIndptr = kAttentionCodes + 3,
  kAttentionKvIndptr = kAttentionCodes + 4,
  kAttentionKvLens = kAttentionCodes + 5,
  kAttentionPage = kAttentionCodes + 6,
  kCompactKvNumAcceptedTokens = kAttentionCodes + 7,
  kCompactKvKvIndptr = kAttentionCodes + 8,
  kCompactKvKvLens = kAttentionCodes + 9,
  kCompactKvAcceptedNodes = kAttentionCodes + 10,
  kCompactKvPage = kAttentionCodes + 11,
  kAttentionWorkspace = kAttentionCodes + 12,
  kCopyKvFromSlots = kAttentionCodes + 13,
  kCopyKvToSlots = kAttentionCodes + 14,
  kLatentSlot = kAttentionCodes + 15,
  kLatentPosition = kAttentionCodes + 16,

  // batching
  kPrepareBatchQoLens = kBatchingCodes + 1,
  kPrepareBatchKvLens = kBatchingCodes + 2,
  kPrepareBatchOutputModes = kBatchingCodes + 3,
  kPrepareBatchKvIndptr = kBatchingCodes + 4,
  kPrepareBatchPages = kBatchingCodes + 5,
  kPrepareBatchKvIndices = kBatchingCodes + 6,
  kPrepareBatchTotalRows = kBatchingCodes + 7,
  kPrepareBatchNumOutputRows = kBatchingCodes + 8,
  kPrepareBatchMaxSeqLen = kBatchingCodes + 9,
  kGatherInputIdsRequest = kBatchingCodes + 10,
  kGatherInputIdsSlot = kBatchingCodes + 11,
  kGatherInputIdsLength = kBatchingCodes + 12,
  kGatherInputIdsPosition = kBatchingCodes + 13,
  kGatherInputIdsTokenId = kBatchingCodes + 14,
  kGatherInputIdsDraftTokenId = kBatchingCodes + 15,
  kGatherOutputRowsRow = kBatchingCodes + 16,
  kBuildTreeNumDraftTokens = kBatchingCodes + 17,
  kBuildTreePositions = kBatchingCodes + 18,
  kBuildTreeParents = kBatchingCodes + 19,
  kPrepareDraftBatchSlots = kBatchingCodes + 20,
  kPrepareDraftBatchQoIndptr = kBatchingCodes + 21,
  kPrepareDraftBatchKvLens = kBatchingCodes + 22,
  kPrepareDraftBatchLens = kBatchingCodes + 23,
  kPrepareDraftBatchRedraftLens = kBatchingCodes + 24,
  kPrepareDraftBatchKvIndptr = kBatchingCodes + 25,
  kPrepareDraftBatchPages = kBatchingCodes + 26,
  kPrepareDraftBatchKvIndices = kBatchingCodes + 27,
  kPrepareDraftBatchTotalRows = kBatchingCodes + 28,
  kAdvanceDraftBatchSlots = kBatchingCodes + 29,
  kAdvanceDraftBatchLens = kBatchingCodes + 30,
  kAdvanceDraftBatchKvIndptr = kBatchingCodes + 31,
  kAdvanceDraftBatchKvIndices = kBatchingCodes + 32,
  kKeepHiddenRowsSlots = kBatchingCodes + 33,
  kKeepHiddenRowsQoIndptr = kBatchingCodes + 34,
  kKeepHiddenRowsKvLens = kBatchingCodes + 35,

  // sampling
  kCommitSlot = kSamplingCodes + 1,
  kCommitSlotTaken = kSamplingCodes + 2,
  kCommitRoom = kSamplingCodes + 3,
  kCommitCountedTokens = kSamplingCodes + 4,

  // suffix_tree
  kNgramLens = kSuffixTreeCodes + 1,
  kNgramMaxDraftTokens = kSuffixTreeCodes + 2,
  kNgramMinSize = kSuffixTreeCodes + 3,
  kNgramMaxSize = kSuffixTreeCodes + 4,
  kNgramLeftmost = kSuffixTreeCodes + 5,
  kNgramNumGivenDrafts = kSuffixTreeCodes + 6,

  // moe
  kMoeSortExpertIds = kMoeCodes + 1,
  kMoeLinearExpertIndptr = kMoeCodes + 2,
  kMoeLinearRowIndices = kMoeCodes + 3,
  kMoeCombinePlaces = kMoeCodes + 4,

  // linear_attention; slots, qo_indptr and kv_lens of an op have consecutive codes
  kCausalConv1dSlots = kLinearAttentionCodes + 1,
  kCausalConv1dQoIndptr = kLinearAttentionCodes + 2,
  kCausalConv1dKvLens = kLinearAttentionCodes + 3,
  kGatedDeltaRuleSlots = kLinearAttentionCodes + 4,
  kGatedDeltaRuleQoIndptr = kLinearAttentionCodes + 5,
  kGatedDeltaRuleKvLens = kLinearAttentionCodes + 6,
};

// Ops that share rules, and the rules: an error code is the sum of the two.
enum class SamplingOp : int32_t {
  kSample = kSamplingCodes + 100,
  kVerify = kSamplingCodes + 200,
  kTopLogprobs = kSamplingCodes + 300,
};

enum class SamplingRule : int32_t {
  kTemperature = 1,
  kTopK = 2,
  kTopP = 3,
  kMinP = 4,
  kTypicalP = 5,
  kSeeds = 6,
  kSlots = 7,
  kMaskIndices = 8,
  kRepetitionPenalty = 9,
  kPresencePenalty = 10,
  kFrequencyPenalty = 11,
  kTokenIds = 12,
  kOutputIndptr = 13,
  kParents = 14,
  kStrategy = 15,
  kTreeStrategy = 16,
  kPolicy = 17,
  kTreePolicy = 18,
  kNoAcceptRates = 19,
  kAcceptRates = 20,
  kDraftProbRows = 21,
  kDraftProbTokenIds = 22,
};

SPECOPS_HOST_DEVICE constexpr ErrorCode code_of(SamplingOp op, SamplingRule rule) {
  return static_cast<ErrorCode>(static_cast<int32_t>(op) + static_cast<int32_t>(rule));
}

// Result of a check of values: the broken rule, and the element of the argument that breaks it. On
// CUDA only the code is used.
struct Fault {
  ErrorCode code = ErrorCode::kNone;
  bool has_value = false;  // false if the argument is absent, or has more than one number
  double value = 0.0;
  int64_t i = -1;  // index of the element; -1: the argument is a single number
  int64_t j = -1;  // index in a second dimension
  // Limits that the rule compares with, in the order of their places in its sentence; -1: none.
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

// Returns the fault of the number `got`: element i or [i, j] of an argument, or the whole argument.
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
