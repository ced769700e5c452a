// SPDX-License-Identifier: Apache-2.0
#include "llamacpp/ops.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "common/dtype.h"
#include "common/parallel.h"
#include "dense/linear.h"
#include "llamacpp/float_product.h"
#include "llamacpp/formats.h"

namespace specops {
namespace {

const char* at(const ggml_tensor* tensor, int64_t i1, int64_t i2, int64_t i3) {
  return static_cast<const char*>(tensor->data) + i1 * tensor->nb[1] + i2 * tensor->nb[2] +
         i3 * tensor->nb[3];
}

bool is_float_rows(const ggml_tensor* tensor) {
  return tensor->type == GGML_TYPE_F32 && tensor->nb[0] == sizeof(float);
}

bool is_readable(const ggml_tensor* tensor) {
  return tensor->nb[0] == ggml_type_size(tensor->type) &&
         (tensor->type == GGML_TYPE_F32 || ggml_get_type_traits(tensor->type)->to_float != nullptr);
}

// Rows of float32 inputs. Row i is indices[i] floats behind x, or i * stride without indices.
struct InputRows {
  const float* x;
  int64_t count, stride;
  const std::vector<int32_t>* indices = nullptr;
};

// Computes out = rows * matrix^T, with matrix `index` of src0.
void product(
    const ggml_tensor* src0, int64_t index, bool is_packed, const InputRows& rows, float* out) {
  const int32_t* indices = rows.indices == nullptr ? nullptr : rows.indices->data();
  int64_t stride = indices == nullptr ? rows.stride : 1;
  if (is_packed) {
    LinearParams params{};
    params.x = rows.x;
    params.weight = packed_weight(src0, index);
    params.out = out;
    params.rows = rows.count;
    params.x_stride = stride;
    params.dtype = params.out_dtype = DType::kFloat32;
    params.row_indices = indices;
    return linear_cpu(params);
  }
  GgmlMatrix matrix{.data = at(src0, 0, index % src0->ne[2], index / src0->ne[2]),
                    .type = src0->type,
                    .row_bytes = src0->nb[1],
                    .num_outputs = src0->ne[1],
                    .num_inputs = src0->ne[0],
                    .rows_are_inputs = false};
  float_product_cpu({.matrix = matrix,
                     .x = rows.x,
                     .rows = rows.count,
                     .x_stride = stride,
                     .row_indices = indices,
                     .out = out});
}

// Returns the factor of a head's mask (ALiBi); 1 without a bias.
float slope(float max_bias, int64_t head, int64_t num_heads) {
  if (max_bias <= 0.0f) return 1.0f;
  auto power = static_cast<int64_t>(1) << static_cast<int>(std::log2(num_heads));
  float base = std::pow(2.0f, -(head < power ? max_bias : max_bias / 2.0f) / power);
  int64_t exponent = head < power ? head + 1 : 2 * (head - power) + 1;
  return std::pow(base, static_cast<float>(exponent));
}

// Runs independent tasks side by side if there is one for every thread, otherwise one after another:
// then each is divided among the threads.
template <typename Fn>
void run_tasks(int64_t count, const Fn& fn) {
  if (count >= num_threads()) return parallel_for(count, 1, [&](int64_t i, int64_t) { fn(i); });
  for (int64_t i = 0; i < count; ++i) fn(i);
}

}  // namespace

bool supports_mul_mat(const ggml_tensor* op, bool is_packed) {
  const ggml_tensor *src0 = op->src[0], *src1 = op->src[1];
  bool readable =
      is_packed ? is_packed_type(src0->type) && src0->view_src == nullptr : is_readable(src0);
  return readable && is_float_rows(src1) && op->type == GGML_TYPE_F32 && ggml_is_contiguous(op) &&
         src1->nb[1] % sizeof(float) == 0 && src1->nb[2] % sizeof(float) == 0;
}

void mul_mat(ggml_tensor* out, bool is_packed) {
  const ggml_tensor *src0 = out->src[0], *src1 = out->src[1];
  // Matrices of src1 that are multiplied by one matrix of src0 follow each other in dimension 2.
  int64_t together = src1->ne[2] / src0->ne[2], per_matrix = src1->ne[3] / src0->ne[3];
  int64_t rows = src1->ne[1], stride = src1->nb[1] / sizeof(float);
  run_tasks(src0->ne[2] * src1->ne[3], [&](int64_t task) {
    int64_t i2 = task % src0->ne[2], i3 = task / src0->ne[2];
    const char* x = at(src1, 0, i2 * together, i3);
    InputRows inputs{reinterpret_cast<const float*>(x), rows * together, stride};
    std::vector<int32_t> indices;
    if (together > 1 && src1->nb[2] != rows * src1->nb[1]) {
      for (int64_t i = 0; i < together; ++i) {
        for (int64_t r = 0; r < rows; ++r) {
          auto bytes = i * src1->nb[2] + r * src1->nb[1];
          indices.push_back(static_cast<int32_t>(bytes / sizeof(float)));
        }
      }
      inputs.indices = &indices;
    }
    char* to = const_cast<char*>(at(out, 0, i2 * together, i3));
    product(
        src0, i3 / per_matrix * src0->ne[2] + i2, is_packed, inputs, reinterpret_cast<float*>(to));
  });
}

bool supports_mul_mat_id(const ggml_tensor* op, bool is_packed) {
  return supports_mul_mat(op, is_packed) && op->src[0]->ne[3] == 1 && op->src[1]->ne[3] == 1 &&
         op->src[2]->type == GGML_TYPE_I32;
}

void mul_mat_id(ggml_tensor* out, bool is_packed) {
  const ggml_tensor *experts = out->src[0], *src1 = out->src[1], *ids = out->src[2];
  int64_t width = out->ne[0], slots = ids->ne[0], tokens = ids->ne[1];
  std::vector<std::vector<int64_t>> rows(experts->ne[2]);  // rows of out of each expert
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t s = 0; s < slots; ++s) {
      int32_t expert;
      std::memcpy(&expert,
                  static_cast<const char*>(ids->data) + t * ids->nb[1] + s * ids->nb[0],
                  sizeof(expert));
      rows[expert].push_back(t * slots + s);
    }
  }
  std::vector<float> results;
  for (int64_t e = 0; e < experts->ne[2]; ++e) {
    if (rows[e].empty()) continue;
    auto count = static_cast<int64_t>(rows[e].size());
    std::vector<int32_t> indices;
    for (int64_t row : rows[e]) {
      int64_t bytes = row % slots % src1->ne[1] * src1->nb[1] + row / slots * src1->nb[2];
      indices.push_back(static_cast<int32_t>(bytes / sizeof(float)));
    }
    results.resize(count * width);
    InputRows inputs{static_cast<const float*>(src1->data), count, 1, &indices};
    product(experts, e, is_packed, inputs, results.data());
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(static_cast<float*>(out->data) + rows[e][i] * width,
                  &results[i * width],
                  width * sizeof(float));
    }
  }
}

bool supports_soft_max(const ggml_tensor* op) {
  const ggml_tensor *in = op->src[0], *mask = op->src[1], *sinks = op->src[2];
  return is_float_rows(in) && ggml_is_contiguous(in) && ggml_is_contiguous(op) &&
         (mask == nullptr || mask->nb[0] == ggml_type_size(mask->type)) &&
         (sinks == nullptr || sinks->type == GGML_TYPE_F32);
}

void soft_max(ggml_tensor* out) {
  const ggml_tensor *in = out->src[0], *mask = out->src[1], *sinks = out->src[2];
  float scale, max_bias;
  std::memcpy(&scale, out->op_params, 4);
  std::memcpy(&max_bias, out->op_params + 1, 4);
  int64_t width = in->ne[0], rows = ggml_nrows(in);
  std::vector<float> slopes(rows), row_sinks(rows), numbers;
  std::vector<const float*> masks(rows);
  if (mask != nullptr && mask->type == GGML_TYPE_F16) numbers.resize(ggml_nrows(mask) * width);
  for (int64_t r = 0; r < rows; ++r) {
    int64_t token = r % in->ne[1], head = r / in->ne[1] % in->ne[2];
    slopes[r] = slope(max_bias, head, in->ne[2]);
    if (sinks != nullptr) row_sinks[r] = static_cast<const float*>(sinks->data)[head];
    if (mask == nullptr) continue;
    int64_t i2 = head % mask->ne[2], i3 = r / in->ne[1] / in->ne[2] % mask->ne[3];
    const char* row = at(mask, token, i2, i3);
    masks[r] = reinterpret_cast<const float*>(row);
    if (numbers.empty()) continue;
    float* converted = &numbers[((i3 * mask->ne[2] + i2) * mask->ne[1] + token) * width];
    bool is_first = head < mask->ne[2] && r / in->ne[1] / in->ne[2] < mask->ne[3];
    if (is_first) {
      ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(row), converted, width);
    }
    masks[r] = converted;
  }
  softmax_cpu({.in = static_cast<const float*>(in->data),
               .out = static_cast<float*>(out->data),
               .rows = rows,
               .width = width,
               .scale = scale,
               .soft_cap = 0.0f,
               .masks = mask == nullptr ? nullptr : masks.data(),
               .slopes = slopes.data(),
               .sinks = sinks == nullptr ? nullptr : row_sinks.data()});
}

bool supports_flash_attn_ext(const ggml_tensor* op) {
  const ggml_tensor *q = op->src[0], *mask = op->src[3], *sinks = op->src[4];
  return is_float_rows(q) && is_readable(op->src[1]) && is_readable(op->src[2]) &&
         ggml_is_contiguous(op) && q->nb[1] % sizeof(float) == 0 && q->nb[2] % sizeof(float) == 0 &&
         (mask == nullptr || mask->type == GGML_TYPE_F16) &&
         (sinks == nullptr || sinks->type == GGML_TYPE_F32);
}

namespace {

// Attention of a few tokens in the query heads that share a head of keys and values.
struct AttentionTask {
  const ggml_tensor* out;
  int64_t kv_head, stream, begin, end;  // tokens [begin, end)

  void run() const {
    const ggml_tensor *q = out->src[0], *k = out->src[1], *v = out->src[2], *mask = out->src[3];
    int64_t heads = q->ne[2] / k->ne[2], rows = (end - begin) * heads;
    float scale, max_bias, soft_cap;
    std::memcpy(&scale, out->op_params, 4);
    std::memcpy(&max_bias, out->op_params + 1, 4);
    std::memcpy(&soft_cap, out->op_params + 2, 4);
    if (soft_cap != 0.0f) scale /= soft_cap;
    // Row (t - begin) * heads + i is token t in query head kv_head * heads + i.
    std::vector<int32_t> indices(rows);
    std::vector<float> slopes(rows), sinks(rows);
    for (int64_t r = 0; r < rows; ++r) {
      int64_t t = begin + r / heads, head = kv_head * heads + r % heads;
      int64_t bytes = (t - begin) * q->nb[1] + r % heads * q->nb[2];
      indices[r] = static_cast<int32_t>(bytes / sizeof(float));
      slopes[r] = slope(max_bias, head, q->ne[2]);
      if (out->src[4] != nullptr) sinks[r] = static_cast<const float*>(out->src[4]->data)[head];
    }
    // Only tokens of the KV cache that some row attends to.
    std::vector<float> numbers;
    int64_t first = 0, last = k->ne[1];
    if (mask != nullptr) unmask(*mask, heads, numbers, first, last);
    int64_t width = last - first;
    std::vector<const float*> masks(rows);
    for (int64_t r = 0; r < rows && mask != nullptr; ++r) {
      masks[r] = numbers.data() + mask_row(*mask, r, heads) * k->ne[1] + first;
    }
    std::vector<float> scores(rows * width), sums(rows * v->ne[0]);
    int64_t kv_stream = stream / (q->ne[3] / k->ne[3]);
    float_product_cpu({.matrix = {.data = at(k, first, kv_head, kv_stream),
                                  .type = k->type,
                                  .row_bytes = k->nb[1],
                                  .num_outputs = width,
                                  .num_inputs = k->ne[0],
                                  .rows_are_inputs = false},
                       .x = reinterpret_cast<const float*>(at(q, begin, kv_head * heads, stream)),
                       .rows = rows,
                       .x_stride = 1,
                       .row_indices = indices.data(),
                       .out = scores.data()});
    softmax_cpu({.in = scores.data(),
                 .out = scores.data(),
                 .rows = rows,
                 .width = width,
                 .scale = scale,
                 .soft_cap = soft_cap,
                 .masks = mask == nullptr ? nullptr : masks.data(),
                 .slopes = slopes.data(),
                 .sinks = out->src[4] == nullptr ? nullptr : sinks.data()});
    float_product_cpu({.matrix = {.data = at(v, first, kv_head, kv_stream),
                                  .type = v->type,
                                  .row_bytes = v->nb[1],
                                  .num_outputs = v->ne[0],
                                  .num_inputs = width,
                                  .rows_are_inputs = true},
                       .x = scores.data(),
                       .rows = rows,
                       .x_stride = width,
                       .row_indices = nullptr,
                       .out = sums.data()});
    for (int64_t r = 0; r < rows; ++r) {
      char* to = const_cast<char*>(at(out, kv_head * heads + r % heads, begin + r / heads, stream));
      std::memcpy(to, &sums[r * v->ne[0]], v->ne[0] * sizeof(float));
    }
  }

 private:
  // Row of the converted masks for row r: they are [heads of the mask, tokens].
  int64_t mask_row(const ggml_tensor& mask, int64_t r, int64_t heads) const {
    int64_t own = mask.ne[2] == 1 ? 0 : r % heads;
    return own * (end - begin) + r / heads;
  }

  // Converts the masks of the rows to float32, and narrows [first, last) to the tokens that some row
  // attends to.
  void unmask(const ggml_tensor& mask,
              int64_t heads,
              std::vector<float>& numbers,
              int64_t& first,
              int64_t& last) const {
    int64_t width = last, of_heads = mask.ne[2] == 1 ? 1 : heads;
    numbers.resize(of_heads * (end - begin) * width);
    int64_t least = width, most = 0;
    for (int64_t i = 0; i < of_heads; ++i) {
      int64_t head = (kv_head * heads + i) % mask.ne[2];
      for (int64_t t = begin; t < end; ++t) {
        float* row = &numbers[(i * (end - begin) + t - begin) * width];
        const char* halves = at(&mask, t, head, stream % mask.ne[3]);
        ggml_fp16_to_fp32_row(reinterpret_cast<const ggml_fp16_t*>(halves), row, width);
        int64_t a = 0, b = width;
        while (a < least && row[a] == -INFINITY) ++a;
        while (b > most && row[b - 1] == -INFINITY) --b;
        least = std::min(least, a);
        most = std::max(most, b);
      }
    }
    first = least < most ? least : 0;
    last = std::max<int64_t>(most, first + 1);
  }
};

}  // namespace

void flash_attn_ext(ggml_tensor* out) {
  const ggml_tensor *q = out->src[0], *k = out->src[1];
  constexpr int64_t kMostRows = 64;
  int64_t heads = q->ne[2] / k->ne[2], tokens = std::max<int64_t>(1, kMostRows / heads);
  int64_t pieces = (q->ne[1] + tokens - 1) / tokens, kv_heads = k->ne[2];
  run_tasks(pieces * kv_heads * q->ne[3], [&](int64_t task) {
    int64_t piece = task / kv_heads % pieces;
    AttentionTask{.out = out,
                  .kv_head = task % kv_heads,
                  .stream = task / kv_heads / pieces,
                  .begin = piece * tokens,
                  .end = std::min((piece + 1) * tokens, q->ne[1])}
        .run();
  });
}

}  // namespace specops
