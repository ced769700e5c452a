// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "common/launch.cuh"
#include "dense/linear_codes.cuh"
#include "gemm/rounded_rows.h"

namespace specops {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <bool kInt4>
void pack(const PackWeightParams& params, CudaStream stream) {
  constexpr int kVectors = kInt4 ? Int4Codes::kVectors : Int8Codes::kVectors;
  int64_t stages = ceil_div(params.num_inputs, kCodeStage);
  int64_t vectors = weight_groups(params.num_outputs) * stages * 2 * kVectors * kWarpSize;
  launch(pack_codes_kernel<kInt4>,
         dim3(static_cast<unsigned>(ceil_div(vectors, kPackCodesThreads))),
         dim3(kPackCodesThreads),
         0,
         stream,
         params,
         stages,
         vectors);
}

// Tile shapes of a block: Few for up to 8 rows; Several, Pairs and Wide for up to 16 rows with few,
// more and many outputs; Many for more rows; and Halves for pieces of 16 inputs. Spread shapes have
// twice as many warps, for layers with so few outputs that SMs have one or two blocks.
using Few = CodeShape<4, 1, 1>;
using FewSpread = CodeShape<8, 1, 1>;
using Several = CodeShape<4, 1, 2>;
using SeveralSpread = CodeShape<8, 1, 2>;
using Pairs = CodeShape<2, 2, 2>;
using Wide = CodeShape<1, 4, 2>;
using Many = CodeShape<1, 4, 4>;
using Halves = CodeShape<1, 4, 4, true>;

// Combinations of weight and row formats that most models use.
template <typename Codes, typename Numbers>
constexpr bool kAreUsual =
    (std::is_same_v<Codes, Int4Codes> && std::is_same_v<Numbers, Int8Numbers>) ||
    (std::is_same_v<Codes, Int8Codes> && std::is_same_v<Numbers, Int16Numbers>);
template <typename Codes, typename Numbers>
constexpr bool kSpreads =
    kAreUsual<Codes, Numbers> || std::is_same_v<Numbers, FloatNumbers<bfloat16>>;

template <typename Codes, typename Numbers, typename Shape>
void run(const LinearParams& params, CudaStream stream) {
  CodePlan plan = code_plan<Codes>(params);
  int64_t tiles =
      ceil_div(params.rows, Shape::kRows) * ceil_div(params.weight.num_outputs, Shape::kOutputs);
  launch(linear_codes_kernel<Codes, Numbers, Shape>,
         dim3(static_cast<unsigned>(tiles)),
         dim3(Shape::kThreads),
         code_bytes<Codes, Numbers, Shape>(plan),
         stream,
         params,
         plan);
}

// Returns whether a device has enough shared memory for the shape. Some have too little for the
// partial sums of many pieces of 16 inputs.
template <typename Codes, typename Numbers, typename Shape>
bool fits(const LinearParams& params) {
  constexpr size_t kMostBytes = 99 << 10;
  return params.rows <= Shape::kRows &&
         code_bytes<Codes, Numbers, Shape>(code_plan<Codes>(params)) <= kMostBytes;
}

// Returns whether SMs hold all blocks of a Spread shape at once, at most two each. By the meter, they
// end 1.35 to 1.65 times as fast then, because a scheduler with one or two warps mostly waits.
template <typename Codes, typename Numbers, typename Shape>
bool spread_pays(const LinearParams& params, CudaStream stream) {
  constexpr int64_t kReservedBytes = 1 << 10;  // of the shared memory of a block
  if (params.rows > Shape::kRows) return false;
  auto bytes = static_cast<int64_t>(code_bytes<Codes, Numbers, Shape>(code_plan<Codes>(params)));
  if (bytes > max_shared_bytes(stream)) return false;
  int64_t blocks = std::min(sm_shared_bytes(stream) / (bytes + kReservedBytes), int64_t{2});
  return ceil_div(params.weight.num_outputs, Shape::kOutputs) <= blocks * num_sms(stream);
}

// Returns whether rounding rows once and multiplying tiles of 64 rows is faster than tiles of 32
// rows that each round them. By the meter (tools/gates), a tile of 64 rows occupies an SM of sm_90a
// 0.8 to 1.3 times as long as one of 32.
bool code_tiles_pay(const LinearParams& params, CudaStream stream) {
  int64_t row_tiles = ceil_div(params.rows, kRoundedRows);
  if (code_tile_steps(params.weight) == 0 || params.rows > INT32_MAX) return false;
  if (params.workspace_size < rounded_workspace_floats(row_tiles, params.weight)) return false;
  int64_t output_tiles = ceil_div(params.weight.num_outputs, Many::kOutputs), sms = num_sms(stream);
  int64_t tiles = ceil_div(row_tiles * output_tiles, sms);
  int64_t small = ceil_div(ceil_div(params.rows, Many::kRows) * output_tiles, sms);
  return 4 * tiles <= 3 * small;
}

}  // namespace

void pack_codes_cuda(const PackWeightParams& params, CudaStream stream) {
  params.dtype == DType::kUInt8 ? pack<true>(params, stream) : pack<false>(params, stream);
}

void linear_codes_cuda(const LinearParams& params, CudaStream stream) {
  if (code_tiles_pay(params, stream)) {
    ExpertsParams one{};  // expert_indptr is nullptr: one expert has all rows
    static_cast<GemmParams&>(one) = params;
    one.workspace = params.workspace;
    one.error = params.error;
    return code_tiles_cuda(one, stream);
  }
  with_codes(params, [&]<typename Codes, typename Numbers>() {
    if constexpr (!Numbers::kIsFloat) {
      if (params.weight.group % 32 != 0) return run<Codes, Numbers, Halves>(params, stream);
    }
    if constexpr (kSpreads<Codes, Numbers>) {
      if (spread_pays<Codes, Numbers, FewSpread>(params, stream)) {
        return run<Codes, Numbers, FewSpread>(params, stream);
      }
      if (params.rows > Few::kRows && spread_pays<Codes, Numbers, SeveralSpread>(params, stream)) {
        return run<Codes, Numbers, SeveralSpread>(params, stream);
      }
    }
    if (params.rows <= Few::kRows) return run<Codes, Numbers, Few>(params, stream);
    if constexpr (kAreUsual<Codes, Numbers>) {
      auto fills = [&](int64_t outputs) {
        return ceil_div(params.weight.num_outputs, outputs) >= num_sms(stream);
      };
      if (params.rows <= Wide::kRows && fills(Wide::kOutputs)) {
        return run<Codes, Numbers, Wide>(params, stream);
      }
      if (fits<Codes, Numbers, Pairs>(params) && fills(Pairs::kOutputs)) {
        return run<Codes, Numbers, Pairs>(params, stream);
      }
    }
    if (fits<Codes, Numbers, Several>(params)) {
      return run<Codes, Numbers, Several>(params, stream);
    }
    run<Codes, Numbers, Many>(params, stream);
  });
}

}  // namespace specops
