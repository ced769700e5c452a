// SPDX-License-Identifier: Apache-2.0
// Converts error codes and faults to sentences. Kernel files must not include it.
//
// A sentence of SPECOPS_FAULT is complete when only the code is known; "got another value" is
// appended unless it contains "got". For a fault with a known value, the index of the element is
// inserted after the name of the argument, the value replaces the text after "got", and the limits
// replace the # signs in order. Text in braces appears only if its limit is known.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "common/error_flag.h"

namespace specops {

constexpr int32_t kMostFaults = 100;  // codes per block: first .. first + 99

// Registers the sentences of kMostFaults codes, counted from `first`. `op` is prepended to each
// sentence.
void add_sentences(int32_t first, const char* const* sentences, const char* op);

// Registers all sentences of SPECOPS_FAULT with codes of `block` that this file includes. Ops that
// share sentences each register them with their own codes and name.
template <int32_t block>
void register_faults(int32_t first = block, const char* op = "") {
  static const auto sentences = []<int32_t... i>(std::integer_sequence<int32_t, i...>) {
    return std::array{kSentence<block + i>...};
  }(std::make_integer_sequence<int32_t, kMostFaults>());
  add_sentences(first, sentences.data(), op);
}

// Returns the error message for a code: "op: argument must be ..., got something else". Empty for
// kNone and unknown codes.
std::string error_sentence(int32_t code);

// Returns the error message for a fault, including the value: "op: argument[2] must be ..., got 7".
std::string error_sentence(const Fault& fault);

}  // namespace specops
