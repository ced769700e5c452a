// SPDX-License-Identifier: Apache-2.0
#pragma once
#include "common/error_flag.h"
namespace specops {
constexpr ErrorCode kMoeSortExpertIds = static_cast<ErrorCode>(6001);
constexpr ErrorCode kMoeLinearExpertIndptr = static_cast<ErrorCode>(6002);
constexpr ErrorCode kMoeLinearRowIndices = static_cast<ErrorCode>(6003);
constexpr ErrorCode kMoeCombinePlaces = static_cast<ErrorCode>(6004);
}
