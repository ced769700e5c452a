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
  kMtpInputTokenId = 2,
  kMtpInputRows = 3,

  // attention
  kRopeSlot = 10,
  kRopePosition = 11,
  kAttentionPage = 12,
  kAttentionLengths = 13,
  kCompactKvNumAcceptedTokens = 14,
  kCompactKvLengths = 15,
  kCompactKvAcceptedNodes = 16,
  kCompactKvPage = 17,

  // batching
  kPrepareBatchQoLens = 20,
  kPrepareBatchKvLens = 21,
  kPrepareBatchOutputModes = 22,
  kPrepareBatchKvIndptr = 23,
  kPrepareBatchKvIndices = 24,
  kPrepareBatchTotalRows = 25,
  kPrepareBatchNumOutputRows = 26,
  kPrepareBatchMaxSeqLen = 27,
  kGatherOutputRowsRow = 28,
  kBuildTreeNumDraftTokens = 29,
  kBuildTreePositions = 30,
  kBuildTreeParents = 31,
  kPrepareDraftBatchSlots = 32,
  kPrepareDraftBatchLengths = 33,
  kPrepareDraftBatchRedraftLens = 34,
  kPrepareDraftBatchKvIndptr = 35,
  kPrepareDraftBatchKvIndices = 36,
  kPrepareDraftBatchTotalRows = 37,
  kAdvanceDraftBatchSlots = 38,
  kAdvanceDraftBatchLens = 39,
  kAdvanceDraftBatchKvIndices = 50,
  kKeepHiddenRowsSlots = 51,
  kKeepHiddenRowsLengths = 52,
  kGatherInputIdsRequest = 53,
  kGatherInputIdsSlot = 54,
  kGatherInputIdsLength = 55,
  kGatherInputIdsPosition = 56,
  kGatherInputIdsTokenId = 57,

  // sampling
  kCommitSlot = 60,
  kCommitRoom = 61,
  kCommitCountedTokens = 62,

  // suffix_tree
  kNgramLens = 40,
  kNgramMaxDraftTokens = 41,
  kNgramMinSize = 42,
  kNgramMaxSize = 43,
  kNgramLeftmost = 44,
  kNgramNumGivenDrafts = 45,
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
  int64_t i = -1;      // -1: the argument is one number
  int64_t j = -1;      // of a second dimension
  int64_t limit = -1;  // what the last word of the rule stands for; -1: the rule says all

  SPECOPS_HOST_DEVICE_MEMBER bool found() const { return code != ErrorCode::kNone; }
};

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
