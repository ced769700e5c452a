// SPDX-License-Identifier: Apache-2.0
// Quantized types of ggml that have packed weights here, and their conversion to the layouts of
// gemm/weight.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/weight.h"
#include "ggml.h"

namespace specops {

// Returns whether weights of a type are packed once, when they are loaded.
bool is_packed_type(ggml_type type);

// Returns the size in bytes of a packed tensor, which may hold several matrices.
size_t packed_bytes(const ggml_tensor* tensor);

// Packs `size` bytes of a tensor, from `offset` on, into tensor->data. Both are multiples of the
// size of a block of the type.
void pack(const ggml_tensor* tensor, const void* data, size_t offset, size_t size);

// Returns matrix `index` of a packed tensor.
WeightParams packed_weight(const ggml_tensor* tensor, int64_t index);

}  // namespace specops
