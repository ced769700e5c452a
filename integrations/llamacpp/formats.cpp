// SPDX-License-Identifier: Apache-2.0
// Source of the block formats: ggml's src/ggml-common.h and src/ggml-quants.c.
#include "llamacpp/formats.h"

#include <algorithm>
#include <cstring>

#include "common/dtype.h"
#include "common/parallel.h"

namespace specops {
namespace {

constexpr int64_t kMostBlock = 256;  // values per block
constexpr int8_t kAsTheyAre[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr int8_t kIq4Nl[16] = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// One block: its values as panels store them (int4: 0 to 15; int8: value + 128), and the scales and
// offsets of its groups.
struct Block {
  uint8_t values[kMostBlock];
  float scales[kMostBlock / 16];
  float offsets[kMostBlock / 16];
};

struct Format {
  ggml_type type;
  WeightKind kind;
  int64_t group;  // values that share a scale
  bool has_offsets;
  const int8_t* code_values;
  void (*decode)(const uint8_t* in, Block& out);
};

float half_at(const uint8_t* p) {
  float16 half;
  std::memcpy(&half, p, 2);
  return to_float(half);
}

// Splits bytes into their low halves, followed by their high halves.
void split_halves(const uint8_t* in, int count, uint8_t* out) {
  for (int i = 0; i < count; ++i) {
    out[i] = in[i] & 15;
    out[count + i] = in[i] >> 4;
  }
}

void add_high_bits(const uint8_t* in, int least, uint8_t* values) {
  uint32_t bits;
  std::memcpy(&bits, in, 4);
  for (int i = 0; i < 32; ++i) {
    values[i] = static_cast<uint8_t>((values[i] | (bits >> i & 1) << 4) + 128 + least);
  }
}

void decode_q4_0(const uint8_t* in, Block& out) {
  out.scales[0] = half_at(in);
  split_halves(in + 2, 16, out.values);
}

void decode_q4_1(const uint8_t* in, Block& out) {
  out.scales[0] = half_at(in);
  out.offsets[0] = half_at(in + 2);
  split_halves(in + 4, 16, out.values);
}

void decode_q5_0(const uint8_t* in, Block& out) {
  out.scales[0] = half_at(in);
  split_halves(in + 6, 16, out.values);
  add_high_bits(in + 2, -16, out.values);
}

void decode_q5_1(const uint8_t* in, Block& out) {
  out.scales[0] = half_at(in);
  out.offsets[0] = half_at(in + 2);
  split_halves(in + 8, 16, out.values);
  add_high_bits(in + 4, 0, out.values);
}

void decode_q8_0(const uint8_t* in, Block& out) {
  out.scales[0] = half_at(in);
  for (int i = 0; i < 32; ++i) out.values[i] = in[2 + i] ^ 0x80;
}

// Decodes the eight scales and eight minimums of 6 bits that follow two float16 factors.
void decode_k_scales(const uint8_t* in, Block& out) {
  float scale = half_at(in), least = half_at(in + 2);
  in += 4;
  for (int i = 0; i < 8; ++i) {
    int low = i < 4 ? in[i] & 63 : (in[i + 4] & 15) | in[i - 4] >> 6 << 4;
    int minimum = i < 4 ? in[i + 4] & 63 : in[i + 4] >> 4 | in[i] >> 6 << 4;
    out.scales[i] = scale * static_cast<float>(low);
    out.offsets[i] = -(least * static_cast<float>(minimum));
  }
}

void decode_q4_k(const uint8_t* in, Block& out) {
  decode_k_scales(in, out);
  for (int i = 0; i < 4; ++i) split_halves(in + 16 + 32 * i, 32, out.values + 64 * i);
}

void decode_q5_k(const uint8_t* in, Block& out) {
  decode_k_scales(in, out);
  for (int i = 0; i < 4; ++i) split_halves(in + 48 + 32 * i, 32, out.values + 64 * i);
  for (int group = 0; group < 8; ++group) {
    for (int i = 0; i < 32; ++i) {
      uint8_t& value = out.values[32 * group + i];
      value = static_cast<uint8_t>((value | (in[16 + i] >> group & 1) << 4) + 128);
    }
  }
}

void decode_q6_k(const uint8_t* in, Block& out) {
  float scale = half_at(in + 208);
  for (int i = 0; i < 16; ++i) {
    out.scales[i] = scale * static_cast<float>(static_cast<int8_t>(in[192 + i]));
  }
  for (int half = 0; half < 2; ++half) {
    split_halves(in + 64 * half, 64, out.values + 128 * half);
    const uint8_t* high = in + 128 + 32 * half;
    for (int i = 0; i < 128; ++i) {
      uint8_t& value = out.values[128 * half + i];
      value = static_cast<uint8_t>((value | (high[i % 32] >> (i / 32 * 2) & 3) << 4) + 128 - 32);
    }
  }
}

constexpr Format kFormats[] = {
    {GGML_TYPE_Q4_0, WeightKind::kInt4, 32, false, nullptr, decode_q4_0},
    {GGML_TYPE_Q4_1, WeightKind::kInt4, 32, true, kAsTheyAre, decode_q4_1},
    {GGML_TYPE_Q5_0, WeightKind::kInt8, 32, false, nullptr, decode_q5_0},
    {GGML_TYPE_Q5_1, WeightKind::kInt8, 32, true, nullptr, decode_q5_1},
    {GGML_TYPE_Q8_0, WeightKind::kInt8, 32, false, nullptr, decode_q8_0},
    {GGML_TYPE_Q4_K, WeightKind::kInt4, 32, true, kAsTheyAre, decode_q4_k},
    {GGML_TYPE_Q5_K, WeightKind::kInt8, 32, true, nullptr, decode_q5_k},
    {GGML_TYPE_Q6_K, WeightKind::kInt8, 16, false, nullptr, decode_q6_k},
    {GGML_TYPE_IQ4_NL, WeightKind::kInt4, 32, false, kIq4Nl, decode_q4_0},
};

const Format* format_of(ggml_type type) {
  for (const Format& format : kFormats) {
    if (format.type == type) return &format;
  }
  return nullptr;
}

// Sizes of one packed matrix in bytes: quantized values, then scales, then offsets.
struct Layout {
  int64_t panels, panel_bytes, groups;
  size_t scales, offsets, size;  // begin of the scales and the offsets; size of all

  Layout(const Format& format, int64_t num_inputs, int64_t num_outputs) {
    panels = weight_panels(num_outputs, Activation::kNone);
    int64_t chunk_bytes = kPanelOutputs * kChunkInputs / (format.kind == WeightKind::kInt4 ? 2 : 1);
    panel_bytes = weight_chunks(num_inputs) * chunk_bytes;
    groups = scale_groups(num_inputs, format.group);
    size_t scale_bytes = sizeof(float) * panels * groups * kPanelOutputs;
    scales = panels * panel_bytes;
    offsets = scales + scale_bytes;
    size = offsets + (format.has_offsets ? scale_bytes : 0);
  }
};

// Writes the block of inputs [first, first + count) of output n of a panel.
void put_block(const Format& format,
               const Layout& layout,
               const Block& block,
               int64_t first,
               int64_t count,
               int64_t n,
               int64_t panel,
               uint8_t* matrix) {
  uint8_t* out = matrix + panel * layout.panel_bytes;
  int64_t line_inputs = format.kind == WeightKind::kInt4 ? 8 : 4;
  int64_t lines = kChunkInputs / line_inputs, b = n / kWeightBlock;
  for (int64_t k = 0; k < count; k += line_inputs) {
    uint32_t words[2] = {};
    std::memcpy(words, block.values + k, line_inputs);
    uint32_t word = line_inputs == 8 ? words[0] | words[1] << 4 : words[0];
    int64_t line = (first + k) / line_inputs;
    int64_t at = (line / lines * kPanelBlocks + b) * lines + line % lines;
    std::memcpy(out + 64 * at + 4 * (n % kWeightBlock), &word, 4);
  }
  int64_t at = (panel * layout.groups + first / format.group) * kPanelOutputs + n;
  auto* scales = reinterpret_cast<float*>(matrix + layout.scales) + at;
  auto* offsets = reinterpret_cast<float*>(matrix + layout.offsets) + at;
  for (int64_t g = 0; g < count / format.group; ++g) {
    scales[g * kPanelOutputs] = block.scales[g];
    if (format.has_offsets) offsets[g * kPanelOutputs] = block.offsets[g];
  }
}

}  // namespace

bool is_packed_type(ggml_type type) { return format_of(type) != nullptr; }

size_t packed_bytes(const ggml_tensor* tensor) {
  return Layout(*format_of(tensor->type), tensor->ne[0], tensor->ne[1]).size * tensor->ne[2] *
         tensor->ne[3];
}

void pack(const ggml_tensor* tensor, const void* data, size_t offset, size_t size) {
  const Format& format = *format_of(tensor->type);
  Layout layout(format, tensor->ne[0], tensor->ne[1]);
  auto block_bytes = static_cast<int64_t>(ggml_type_size(tensor->type));
  int64_t block_values = ggml_blck_size(tensor->type), row_blocks = tensor->ne[0] / block_values;
  int64_t begin = static_cast<int64_t>(offset) / block_bytes;
  int64_t end = begin + static_cast<int64_t>(size) / block_bytes;
  int64_t matrices = tensor->ne[2] * tensor->ne[3];
  parallel_for(matrices * layout.panels, 1, [&](int64_t index, int64_t) {
    int64_t matrix = index / layout.panels, panel = index % layout.panels;
    int64_t rows = std::min(tensor->ne[1] - panel * kPanelOutputs, kPanelOutputs);
    auto* out = static_cast<uint8_t*>(tensor->data) + matrix * layout.size;
    for (int64_t n = 0; n < rows; ++n) {
      int64_t row = (matrix * tensor->ne[1] + panel * kPanelOutputs + n) * row_blocks;
      int64_t last = std::min(end - row, row_blocks);
      for (int64_t b = std::max<int64_t>(begin - row, 0); b < last; ++b) {
        Block block;
        format.decode(static_cast<const uint8_t*>(data) + (row + b - begin) * block_bytes, block);
        put_block(format, layout, block, b * block_values, block_values, n, panel, out);
      }
    }
  });
}

WeightParams packed_weight(const ggml_tensor* tensor, int64_t index) {
  const Format& format = *format_of(tensor->type);
  Layout layout(format, tensor->ne[0], tensor->ne[1]);
  const char* data = static_cast<const char*>(tensor->data) + index * layout.size;
  WeightParams weight{};
  weight.kind = format.kind;
  weight.data = data;
  weight.scales = reinterpret_cast<const float*>(data + layout.scales);
  if (format.has_offsets) weight.offsets = reinterpret_cast<const float*>(data + layout.offsets);
  weight.group = format.group;
  weight.row_numbers = RowNumbers::kInt8;
  weight.code_values = format.code_values;
  weight.num_outputs = tensor->ne[1];
  weight.num_inputs = tensor->ne[0];
  weight.activation = Activation::kNone;
  return weight;
}

}  // namespace specops
