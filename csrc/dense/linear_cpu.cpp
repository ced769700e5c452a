// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "common/parallel.h"
#include "dense/linear.h"
#include "gemm/ranges_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

// Cuts the output into ranges of blocks, and of rows where there are too few blocks: one range for
// work not worth waking a thread, one a thread for small work, several for large work. A block of
// gates and that of their ups are never parted.
template <typename S>
void run(const LinearParams& params) {
  int64_t together = is_gated(params.weight.activation) ? 2 : 1;
  int64_t blocks = packed_blocks(params.weight.num_outputs, params.weight.activation);
  int64_t row_tiles = ceil_div(params.rows, Shape::kMaxRows);
  // Time in bytes of cached weights: from one row to sixty-four it grows as (rows + 2) / 3.
  int64_t bytes = blocks * steps_of<S>(params.weight.num_inputs) * S::kBytes;
  int64_t cost = bytes * (params.rows + 2) / 3;
  int64_t threads = num_threads();
  constexpr int64_t kInlineCost = 192 << 10;  // about 2 us
  constexpr int64_t kChunkCost = 512 << 10;
  int64_t chunks = 1;
  if (cost > kInlineCost) chunks = max64(1, min64(8, cost / kChunkCost / threads)) * threads;
  int64_t least = max64((max_blocks(params.rows) + 1) / 2, together);
  int64_t columns = min64(chunks, ceil_div(blocks, least));
  int64_t row_ranges = min64(row_tiles, ceil_div(chunks, columns));
  parallel_for(columns * row_ranges, 1, [&](int64_t index, int64_t) {
    int64_t c = index / row_ranges, r = index % row_ranges;
    // Threads that are equally fast take ranges in turn.
    int64_t next = min64((index + threads) / row_ranges, columns);
    run_range<S>(params,
                 part_begin(params.rows, row_ranges, r),
                 part_begin(params.rows, row_ranges, r + 1),
                 together * part_begin(blocks / together, columns, c),
                 together * part_begin(blocks / together, columns, c + 1),
                 together * part_begin(blocks / together, columns, next));
  });
}

// packed[block][step][i] = the word of inputs `step` of output 16 * block + i, zero where missing;
// of gates and ups in the order of linear.h.
// Cost:    the weight read and written once.
// Assumes: rows of weight contiguous.
// Order:   a permutation.
// Source:  the layout vdpbf16ps asks for: pairs of inputs side by side.
// Threads: one block a chunk.
template <typename T, typename Row = T>
void pack(const PackWeightParams& params) {
  constexpr int kInputs = Step<Row, T>::kInputs;
  using Word = std::conditional_t<sizeof(T) == 1, uint16_t, uint32_t>;
  constexpr int64_t kStrip = 64;  // steps whose 4 KiB stay in cache while 16 rows are read
  int64_t steps = steps_of<Step<Row, T>>(params.num_inputs);
  int64_t full_steps = params.num_inputs / kInputs;
  int64_t width = is_gated(params.activation) ? params.num_outputs / 2 : params.num_outputs;
  int64_t blocks = packed_blocks(params.num_outputs, params.activation);
  parallel_for(blocks, 1, [&](int64_t block, int64_t) {
    int64_t first = (is_gated(params.activation) ? block / 2 : block) * kWeightBlock;
    int64_t from = is_gated(params.activation) && block % 2 != 0 ? width : 0;
    auto* packed = static_cast<Word*>(params.packed) + block * steps * kWeightBlock;
    for (int64_t strip = 0; strip < steps; strip += kStrip) {
      int64_t end = min64(strip + kStrip, steps);
      for (int64_t i = 0; i < kWeightBlock; ++i) {
        bool present = first + i < width;
        const T* src = static_cast<const T*>(params.weight);
        if (present) src += (from + first + i) * params.weight_stride;
        for (int64_t step = strip; step < end; ++step) {
          Word word = 0;
          if (present && step < full_steps) {
            std::memcpy(&word, src + step * kInputs, sizeof(Word));
          } else if (present) {
            std::memcpy(&word, src + params.num_inputs - 1, sizeof(T));
          }
          packed[step * kWeightBlock + i] = word;
        }
      }
    }
  });
}

}  // namespace

void pack_weight_cpu(const PackWeightParams& params) {
  switch (params.dtype) {
    case DType::kBFloat16:
      return pack<bfloat16>(params);
    case DType::kInt8:
      return pack<int8_t, float>(params);
    default:
      return pack<float>(params);
  }
}

void linear_cpu(const LinearParams& params) {
  bool is_bf16 = params.dtype == DType::kBFloat16;
  if (params.weight.kind == WeightKind::kInt8) {
    return is_bf16 ? run<Step<bfloat16, int8_t>>(params) : run<Step<float, int8_t>>(params);
  }
  return is_bf16 ? run<Step<bfloat16, bfloat16>>(params) : run<Step<float, float>>(params);
}

}  // namespace specops::SPECOPS_ISA
