// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "dense/linear_ranges_cpu.h"
#include "gemm/tile_cpu.h"

namespace specops::SPECOPS_ISA {
namespace {

// Computes the product in ranges. A range never separates a block of gates from the block of its
// ups.
template <typename S>
void run_blocks(const LinearParams& params) {
  int64_t together = is_gated(params.weight.activation) ? 2 : 1;
  int64_t blocks = packed_blocks(params.weight.num_outputs, params.weight.activation);
  int64_t bytes = blocks * steps_of<S>(params.weight.num_inputs) * S::kBytes;
  int64_t least = max64((max_blocks(params.rows) + 1) / 2, together);
  int64_t row_tiles = ceil_div(params.rows, Shape::kMaxRows);
  run(params, blocks, together, Ranges(bytes, params.rows, row_tiles, ceil_div(blocks, least)));
}

// Sets packed[block][step][i] to the inputs of `step` of output 16 * block + i, as one word;
// missing inputs and outputs are zero. Gates and ups are ordered as in gemm/weight.h.
// Cost:    the weight read and written once.
// Assumes: rows of weight contiguous.
// Order:   a permutation.
// Source:  the layout that vdpbf16ps requires: pairs of inputs side by side.
// Threads: one item per block.
template <typename T>
void pack(const PackWeightParams& params) {
  constexpr int kInputs = Step<T, T>::kInputs;
  using Word = uint32_t;
  constexpr int64_t kStrip = 64;  // steps whose 4 KiB stay in cache while 16 rows are read
  int64_t steps = steps_of<Step<T, T>>(params.num_inputs);
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

// The rows of a weight that become the outputs of a packed block.
struct BlockRows {
  int64_t first;  // row of the block's first output
  int64_t count;  // how many of the block's sixteen outputs exist

  BlockRows(const PackWeightParams& params, int64_t block) {
    bool gated = is_gated(params.activation);
    int64_t width = gated ? params.num_outputs / 2 : params.num_outputs;
    int64_t begin = (gated ? block / 2 : block) * kWeightBlock;
    first = begin + (gated && block % 2 != 0 ? width : 0);
    count = max64(0, min64(kWeightBlock, width - begin));
  }
};

// Packs int8 and int4 weights in panels (gemm/weight.h). Missing elements are 0.
// Cost:    the weight read and written once.
// Assumes: rows of weight contiguous.
// Order:   a permutation.
// Source:  -
// Threads: one item per panel.
template <typename Kind>
void pack_panels(const PackWeightParams& params) {
  constexpr int kLines = kChunkInputs / Kind::kLineInputs;  // lines per chunk of a block
  int64_t panels = weight_panels(params.num_outputs, params.activation);
  int64_t bytes = panel_bytes<Kind>(params.num_inputs);
  parallel_for(panels, 1, [&](int64_t panel, int64_t) {
    uint8_t* out = static_cast<uint8_t*>(params.packed) + panel * bytes;
    std::memset(out, 0, bytes);
    for (int64_t b = 0; b < kPanelBlocks; ++b) {
      BlockRows rows(params, panel * kPanelBlocks + b);
      for (int64_t n = 0; n < rows.count; ++n) {
        const auto* codes = static_cast<const uint8_t*>(params.weight);
        codes += (rows.first + n) * params.weight_stride;
        for (int64_t k = 0, line = 0; k < params.num_inputs; k += Kind::kLineInputs, ++line) {
          uint32_t words[2] = {};  // of four values each
          std::memcpy(words, codes + k, min64(Kind::kLineInputs, params.num_inputs - k));
          uint32_t word = words[0] ^ 0x80808080u;
          if (Kind::kLineInputs == 8) word = words[0] | words[1] << 4;
          int64_t at = (line / kLines * kPanelBlocks + b) * kLines + line % kLines;
          std::memcpy(out + 64 * at + 4 * n, &word, 4);
        }
      }
    }
  });
}

// Packs fp8 weights in steps (gemm/weight.h). Missing elements are zeros.
// Cost:    the weight read and written once.
// Assumes: rows of weight contiguous.
// Order:   a permutation.
// Source:  -
// Threads: one item per block.
void pack_fp8(const PackWeightParams& params) {
  int64_t inputs = 2 * steps_of<Step<float, E4M3>>(params.num_inputs);
  int64_t blocks = packed_blocks(params.num_outputs, params.activation);
  parallel_for(blocks, 1, [&](int64_t block, int64_t) {
    uint8_t* out = static_cast<uint8_t*>(params.packed) + block * inputs * kWeightBlock;
    std::memset(out, 0, inputs * kWeightBlock);
    BlockRows rows(params, block);
    for (int64_t n = 0; n < rows.count; ++n) {
      const auto* codes = static_cast<const uint8_t*>(params.weight);
      codes += (rows.first + n) * params.weight_stride;
      for (int64_t k = 0; k < params.num_inputs; ++k) out[k * kWeightBlock + n] = codes[k];
    }
  });
}

}  // namespace

void pack_weight_cpu(const PackWeightParams& params) {
  switch (params.dtype) {
    case DType::kBFloat16:
      return pack<bfloat16>(params);
    case DType::kInt8:
      return pack_panels<Int8Codes>(params);
    case DType::kUInt8:
      return pack_panels<Int4Codes>(params);
    case DType::kFloat8E4M3:
      return pack_fp8(params);
    default:
      return pack<float>(params);
  }
}

void linear_cpu(const LinearParams& params) {
  bool is_bf16 = params.dtype == DType::kBFloat16;
  switch (params.weight.kind) {
    case WeightKind::kPlain:
      return is_bf16 ? run_blocks<Step<bfloat16, bfloat16>>(params)
                     : run_blocks<Step<float, float>>(params);
    case WeightKind::kFp8:
      return is_bf16 ? run_blocks<Step<bfloat16, E4M3>>(params)
                     : run_blocks<Step<float, E4M3>>(params);
    default:
      run_panels(params, kIntegerRows);
  }
}

}  // namespace specops::SPECOPS_ISA
