// SPDX-License-Identifier: Apache-2.0
// Operations of ggml that this library computes. The bits of a row of the result depend on no other
// row.
#pragma once

#include "ggml.h"

namespace specops {

// Return whether the library computes an operation. `is_packed`: src[0] has a packed layout.
bool supports_mul_mat(const ggml_tensor* op, bool is_packed);
bool supports_mul_mat_id(const ggml_tensor* op, bool is_packed);
bool supports_soft_max(const ggml_tensor* op);
bool supports_flash_attn_ext(const ggml_tensor* op);

void mul_mat(ggml_tensor* out, bool is_packed);
void mul_mat_id(ggml_tensor* out, bool is_packed);
void soft_max(ggml_tensor* out);
void flash_attn_ext(ggml_tensor* out);

}  // namespace specops
