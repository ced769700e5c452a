// SPDX-License-Identifier: Apache-2.0
// How a CUDA kernel says that the data of a tensor is wrong: one int32 per device, 0 = all is well.
// The first fault wins; the row at fault is skipped. Plain C++; report_error() is in device.cuh.
#pragma once

#include <cstdint>

#include "common/cuda_stream.h"

namespace specops {

// Stored as int32; each has its sentence in error_flag.cpp.
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
  kSampleTemperature = 64,
  kSampleTopK = 65,
  kSampleTopP = 66,
  kSampleMinP = 67,
  kVerifyTemperature = 68,
  kVerifyTopK = 69,
  kVerifyTopP = 70,
  kVerifyMinP = 71,
  kVerifyOutputIndptr = 72,
  kVerifyStrategy = 73,
  kVerifyPolicy = 74,
  kSampleSeeds = 63,
  kVerifySeeds = 75,
  kSampleTypicalP = 76,
  kSampleSlots = 77,
  kSampleMaskIndices = 78,
  kSamplePenalties = 79,
  kVerifyTypicalP = 80,
  kVerifySlots = 81,
  kVerifyMaskIndices = 82,
  kVerifyPenalties = 83,
  kVerifyAcceptRates = 84,
  kVerifyParents = 85,
  kVerifyDraftProbTokenIds = 86,
  kTopLogprobsParameters = 87,
  kSampleTokenIds = 88,
  kVerifyTokenIds = 89,
  kVerifyTreeStrategy = 90,
  kVerifyTreePolicy = 91,
  kVerifyNoAcceptRates = 92,
  kVerifyDraftProbRows = 93,

  // suffix_tree
  kNgramLens = 40,
  kNgramMaxDraftTokens = 41,
  kNgramMinSize = 42,
  kNgramMaxSize = 43,
  kNgramLeftmost = 44,
  kNgramNumGivenDrafts = 45,
};

struct ErrorFlag {
  int32_t* code = nullptr;  // on the device
};

// "op: argument must be ..., got something else"; nullptr for kNone or a number that is no code.
const char* error_sentence(int32_t code);

struct TakeErrorParams {
  ErrorFlag error;
  int32_t* out;  // [1]; receives the code, and the flag is cleared
};

ErrorFlag error_flag(int device);     // the flag of a device
int32_t take_error_sync(int device);  // reads and clears it, after all work of the device
SPECOPS_DECLARE_CUDA(take_error_cuda, TakeErrorParams);

}  // namespace specops
