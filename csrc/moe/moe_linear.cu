// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "moe/moe_linear.cuh"

namespace specops {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t row_tiles_of(const ExpertsParams& params) {
  return most_row_tiles(params.rows, params.num_experts);
}

dim3 grid_of(const ExpertsParams& params, int64_t output_tiles) {
  return dim3(static_cast<unsigned>(row_tiles_of(params) * output_tiles));
}

template <typename T>
void launch_stream(const ExpertsParams& params, const GemmPlan& plan, CudaStream stream) {
  int slots = 4 / plan.leaves, warps = slots * plan.leaves;
  launch(moe_stream_kernel<T>,
         grid_of(params, ceil_div(weight_groups(params.weight.num_outputs), slots)),
         dim3(static_cast<unsigned>(warps * kWarpSize)),
         warps * kStreamRing * sizeof(uint4),
         stream,
         params,
         plan,
         row_tiles_of(params));
}

template <typename T, int kRows>
void launch_tiles(const ExpertsParams& params, const GemmPlan& plan, CudaStream stream) {
  using Shape = TileShape<2, kRows>;
  int64_t row_tiles = most_row_tiles(params.rows, params.num_experts, kRows);
  int64_t tiles = row_tiles * ceil_div(params.weight.num_outputs, Shape::kOutputs);
  launch(moe_tile_kernel<T, kRows>,
         dim3(static_cast<unsigned>(tiles)),
         dim3(Shape::kThreads),
         Shape::kSmemBytes,
         stream,
         params,
         plan,
         row_tiles);
}

// If experts have more than kExpertRows rows on average, the stream kernel would read most weights
// more than once.
template <typename T>
void run(const ExpertsParams& params, CudaStream stream) {
  GemmPlan plan = plan_of(params, false);
  int64_t expert_rows = ceil_div(params.rows, params.num_experts);
  if (expert_rows <= kExpertRows || !plan.aligned) return launch_stream<T>(params, plan, stream);
  if (expert_rows <= 64) return launch_tiles<T, 64>(params, plan, stream);
  launch_tiles<T, 128>(params, plan, stream);
}

void run_float(const ExpertsParams& params, CudaStream stream) {
  GemmPlan plan = plan_of(params, false);
  int slots = 4 / plan.leaves, warps = slots * plan.leaves;
  launch(plan.aligned ? moe_float_kernel<true> : moe_float_kernel<false>,
         grid_of(params, ceil_div(weight_groups(params.weight.num_outputs), slots)),
         dim3(static_cast<unsigned>(warps * kWarpSize)),
         warps * kFloatRows * kWarpSize * sizeof(float),
         stream,
         params,
         plan,
         row_tiles_of(params));
}

}  // namespace

void moe_linear_cuda(const ExpertsParams& params, CudaStream stream) {
  if (params.weight.kind != WeightKind::kPlain) return moe_codes_cuda(params, stream);
  if (params.dtype == DType::kBFloat16) return run<bfloat16>(params, stream);
  if (params.dtype == DType::kFloat16) return run<float16>(params, stream);
  run_float(params, stream);
}

}  // namespace specops
