// SPDX-License-Identifier: Apache-2.0
#include "common/parallel.h"
#include "dense/mtp_input.h"
#include "dense/norm_row_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

template <typename T>
inline void clear_row(T* out, int64_t width) {
  for (int64_t i = 0; i < width; ++i) out[i] = T{};
}

// Writes the row at position i: norm(embedding[token i + ahead]) next to norm(hidden state of
// position i). If there is no token or no state, its half is zeros.
// Cost:    4 * rows * width elements moved; a row stays in L1.
// Assumes: rows, slots and token ids checked by ops.cpp.
// Order:   that of norm_row. A row's bits depend only on the row.
// Source:  DeepSeek-V3, section 2.2: tokens shifted, states not.
// Threads: one item per range of rows.
template <typename T>
void run(const MtpInputParams& params) {
  const auto* embedding = static_cast<const T*>(params.embedding);
  const auto* embedding_norm = static_cast<const T*>(params.embedding_norm);
  const auto* hidden_norm = static_cast<const T*>(params.hidden_norm);
  int64_t width = params.width;
  // A chunk should be worth waking a thread for: about 8192 elements.
  parallel_for(params.rows, 4096 / width + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* out = static_cast<T*>(params.out) + row * 2 * width;
      int64_t request = params.row_to_request[row];
      if (request < 0) {
        clear_row(out, 2 * width);
        continue;
      }
      int64_t position = params.positions[row];
      int32_t token = token_ahead(params, params.slots[request], position);
      int64_t source = params.source_rows[row];
      T* token_half = out + (params.hidden_first ? width : 0);
      T* hidden_half = out + (params.hidden_first ? 0 : width);
      if (token < 0 || (params.mask_first_position && position == 0)) {
        clear_row(token_half, width);
      } else {
        norm_row(embedding + token * width,
                 static_cast<T*>(nullptr),
                 embedding_norm,
                 token_half,
                 width,
                 params.eps);
      }
      const T* state = source >= 0
                           ? static_cast<const T*>(params.hidden) + source * params.hidden_stride
                           : static_cast<const T*>(params.kept) + (-2 - source) * width;
      norm_row(state, static_cast<T*>(nullptr), hidden_norm, hidden_half, width, params.eps);
    }
  });
}

}  // namespace

void mtp_input_cpu(const MtpInputParams& params) {
  switch (params.dtype) {
    case DType::kBFloat16:
      return run<bfloat16>(params);
    case DType::kFloat16:
      return run<float16>(params);
    default:
      return run<float>(params);
  }
}

}  // namespace specops::SPECOPS_ISA
