// SPDX-License-Identifier: Apache-2.0
#include "attention/rope_append_kv/rope_append_kv.cuh"
#include "common/launch.cuh"

namespace specops {
namespace {

bool on_16_bytes(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

// Returns whether every chunk is full, 16-byte aligned and rotated with a full chunk.
bool in_vectors(const RopeAppendKvParams& p, int64_t chunk) {
  int64_t bytes = dtype_bytes(p.dtype);
  bool strides =
      p.q_stride * bytes % 16 == 0 && p.k_stride * bytes % 16 == 0 && p.v_stride * bytes % 16 == 0;
  bool pointers = on_16_bytes(p.q) && on_16_bytes(p.k) && on_16_bytes(p.v) &&
                  on_16_bytes(p.q_out) && on_16_bytes(p.k_cache) && on_16_bytes(p.v_cache) &&
                  on_16_bytes(p.cos_sin) && on_16_bytes(p.q_norm_weight) &&
                  on_16_bytes(p.k_norm_weight);
  bool chunks = p.head_dim % chunk == 0 && p.rotary_dim % (2 * chunk) == 0;
  return chunks && strides && pointers;
}

}  // namespace

void rope_append_kv_cuda(const RopeAppendKvParams& params, CudaStream stream) {
  int64_t heads = params.num_qo_heads + 2 * params.num_kv_heads;
  RopeAppendKvGrid cut{.lanes = 1, .groups_per_row = static_cast<int>(heads)};
  int chunk = params.head_dim <= kRopeChunk * kWarpSize ? kRopeChunk : kLargeRopeChunk;
  while (cut.lanes * chunk < params.head_dim) cut.lanes *= 2;
  // Put several heads into a group once the rows alone fill the GPU.
  constexpr int64_t kResidentThreads = 2048, kMostHeads = 8;
  int64_t enough = 2 * num_sms(stream) * kResidentThreads;
  for (int64_t of_group = 2; of_group <= kMostHeads; of_group *= 2) {
    int64_t groups = (heads + of_group - 1) / of_group;
    if (params.rows * groups * cut.lanes < enough) break;
    cut.groups_per_row = static_cast<int>(groups);
  }
  int64_t groups_per_block = kRopeThreads / cut.lanes;
  int64_t blocks = (params.rows * cut.groups_per_row + groups_per_block - 1) / groups_per_block;
  auto run = [&](auto kernel) {
    launch(kernel, dim3(static_cast<unsigned>(blocks)), kRopeThreads, 0, stream, params, cut);
  };
  bool vectors = in_vectors(params, chunk);
  auto pick = [&]<typename T, typename Cache = T>() {
    if (chunk == kRopeChunk) {
      run(vectors ? rope_append_kv_kernel<T, true, kRopeChunk, Cache>
                  : rope_append_kv_kernel<T, false, kRopeChunk, Cache>);
    } else {
      run(vectors ? rope_append_kv_kernel<T, true, kLargeRopeChunk, Cache>
                  : rope_append_kv_kernel<T, false, kLargeRopeChunk, Cache>);
    }
  };
  if (params.cache_dtype == DType::kInt8) return pick.operator()<bfloat16, KvInt8>();
  if (params.cache_dtype == DType::kFloat8E4M3) return pick.operator()<bfloat16, KvE4M3>();
  if (params.dtype == DType::kBFloat16) return pick.operator()<bfloat16>();
  if (params.dtype == DType::kFloat16) return pick.operator()<float16>();
  pick.operator()<float>();
}

}  // namespace specops
