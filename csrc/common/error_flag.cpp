// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdio>
#include <vector>

#include "common/error_sentence.h"

namespace specops {

namespace {

const std::string kGot = ", got ";

struct Sentences {
  int32_t first;
  const char* const* of;
  const char* op;
};

std::vector<Sentences> registered;

// Returns the sentence of a code as written in SPECOPS_FAULT; empty if there is no such code.
std::string find_sentence(ErrorCode code) {
  for (const Sentences& sentences : registered) {
    int32_t i = static_cast<int32_t>(code) - sentences.first;
    if (i < 0 || i >= kMostFaults || sentences.of[i] == nullptr) continue;
    std::string out = std::string(sentences.op) + sentences.of[i];
    return out.find(kGot) == std::string::npos ? out + kGot + "another value" : out;
  }
  return {};
}

// Replaces the # signs in the braces of a sentence by the fault's limits, or removes the text in
// braces if there are none.
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

void add_sentences(int32_t first, const char* const* sentences, const char* op) {
  registered.push_back({first, sentences, op});
}

std::string error_sentence(int32_t code) {
  return error_sentence(Fault{.code = static_cast<ErrorCode>(code)});
}

std::string error_sentence(const Fault& fault) {
  std::string out = with_limits(find_sentence(fault.code), fault);
  if (out.empty() || !fault.has_value) return out;
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
