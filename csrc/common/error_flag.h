// SPDX-License-Identifier: Apache-2.0
// How a CUDA kernel says that the data of a tensor is wrong: one int32 per device, 0 = all is well.
// The first fault wins; the row at fault is skipped. Plain C++; report_error() is in device.cuh.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"
#include "common/host_device.h"

namespace specops {

// Stored as int32; each has its sentence in error_flag.cpp. What several ops of the sampling family
// refuse for the same reason is a SamplingRule below.
enum class ErrorCode : int32_t {
  kNone = 0,

  // dense
  kEmbeddingTokenId = 1,
  kMtpInputRequest = 2,
  kMtpInputSlot = 3,
  kMtpInputLength = 4,
  kMtpInputPosition = 5,
  kMtpInputSourceRow = 6,
  kMtpInputTokenId = 7,
  kMtpInputDraftTokenId = 8,
  kLinearWorkspace = 9,

  // attention
  kRopeSlot = 10,
  kRopePosition = 11,
  kAttentionQoIndptr = 12,
  kAttentionKvIndptr = 13,
  kAttentionKvLens = 14,
  kAttentionPage = 15,
  kCompactKvNumAcceptedTokens = 16,
  kCompactKvKvIndptr = 17,
  kCompactKvKvLens = 18,
  kCompactKvAcceptedNodes = 19,
  kCompactKvPage = 20,
  kAttentionWorkspace = 21,
  kCopyKvFromSlots = 22,
  kCopyKvToSlots = 23,
  kLatentSlot = 24,
  kLatentPosition = 25,

  // batching
  kPrepareBatchQoLens = 30,
  kPrepareBatchKvLens = 31,
  kPrepareBatchOutputModes = 32,
  kPrepareBatchKvIndptr = 33,
  kPrepareBatchPages = 34,
  kPrepareBatchKvIndices = 35,
  kPrepareBatchTotalRows = 36,
  kPrepareBatchNumOutputRows = 37,
  kPrepareBatchMaxSeqLen = 38,
  kGatherInputIdsRequest = 40,
  kGatherInputIdsSlot = 41,
  kGatherInputIdsLength = 42,
  kGatherInputIdsPosition = 43,
  kGatherInputIdsTokenId = 44,
  kGatherInputIdsDraftTokenId = 45,
  kGatherOutputRowsRow = 46,
  kBuildTreeNumDraftTokens = 47,
  kBuildTreePositions = 48,
  kBuildTreeParents = 49,
  kPrepareDraftBatchSlots = 50,
  kPrepareDraftBatchQoIndptr = 51,
  kPrepareDraftBatchKvLens = 52,
  kPrepareDraftBatchLens = 53,
  kPrepareDraftBatchRedraftLens = 54,
  kPrepareDraftBatchKvIndptr = 55,
  kPrepareDraftBatchPages = 56,
  kPrepareDraftBatchKvIndices = 57,
  kPrepareDraftBatchTotalRows = 58,
  kAdvanceDraftBatchSlots = 60,
  kAdvanceDraftBatchLens = 61,
  kAdvanceDraftBatchKvIndptr = 62,
  kAdvanceDraftBatchKvIndices = 63,
  kKeepHiddenRowsSlots = 64,
  kKeepHiddenRowsQoIndptr = 65,
  kKeepHiddenRowsKvLens = 66,

  // sampling
  kCommitSlot = 70,
  kCommitSlotTaken = 71,
  kCommitRoom = 72,
  kCommitCountedTokens = 73,

  // suffix_tree
  kNgramLens = 80,
  kNgramMaxDraftTokens = 81,
  kNgramMinSize = 82,
  kNgramMaxSize = 83,
  kNgramLeftmost = 84,
  kNgramNumGivenDrafts = 85,
};

// The ops that share rules, and the rules: a code is the sum of the two.
enum class SamplingOp : int32_t { kSample = 100, kVerify = 200, kTopLogprobs = 300 };

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

// What a rule about values has found: which one is broken, and by which element of the argument. On
// CUDA only the code is of use.
struct Fault {
  ErrorCode code = ErrorCode::kNone;
  bool has_value = false;  // else it is an argument that is absent, or more than one number
  double value = 0.0;
  int64_t i = -1;  // -1: the argument is one number
  int64_t j = -1;  // of a second dimension
  // What the rule compares with, in the order in which its sentence has places for it; -1: nothing.
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

// Of the number `got`: element i or [i, j] of an argument, or all of it.
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

ErrorFlag error_flag(int device);     // the flag of a device
int32_t take_error_sync(int device);  // reads and clears it, after all work of the device
SPECOPS_DECLARE_CUDA(take_error_cuda, TakeErrorParams);

}  // namespace specops
