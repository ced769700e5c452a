// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "dense/linear.cuh"

namespace specops {
namespace {

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

dim3 grid_of(int64_t x, int64_t y = 1) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

template <typename T>
void pack(const PackWeightParams& params, CudaStream stream) {
  int64_t groups = weight_groups(params.num_outputs);
  int64_t steps = sizeof(T) == 2 ? 2 * sum_leaves(params.num_inputs).stages
                                 : ceil_div(params.num_inputs, kChunk<T>);
  int64_t lanes = groups * steps * (sizeof(T) == 2 ? 2 * kWarpSize : kWarpSize);
  bool aligned = chunk_aligned<T>(params.weight, params.weight_stride);
  launch(pack_weight_kernel<T>,
         grid_of(ceil_div(lanes, kPackThreads)),
         dim3(kPackThreads),
         0,
         stream,
         params,
         steps,
         lanes,
         aligned);
}

template <typename T, int kTiles, int kColumns>
void launch_stream(const LinearParams& params, const GemmPlan& plan, CudaStream stream) {
  int slots = 4 / plan.leaves;
  int64_t units = weight_groups(params.weight.num_outputs) * 2 / kTiles;
  int warps = slots * plan.leaves;
  launch(linear_stream_kernel<T, kTiles, kColumns>,
         grid_of(ceil_div(units, slots)),
         dim3(static_cast<unsigned>(warps * kWarpSize)),
         warps * kStreamRing * sizeof(uint4),
         stream,
         params,
         plan);
}

template <typename T, int kWarpTiles, int kRows, bool kAligned>
void tile_rows(const LinearParams& params, GemmPlan plan, CudaStream stream) {
  using Shape = TileShape<kWarpTiles, kRows>;
  int64_t tiles =
      ceil_div(params.rows, kRows) * ceil_div(params.weight.num_outputs, Shape::kOutputs);
  // The kernel's tiles may be smaller than linear_splits() assumes, so there may be more tiles than
  // counters.
  plan.split = plan.split && Shape::kSplits && tiles <= kWorkspaceCounters;
  launch(linear_tile_kernel<T, kWarpTiles, kRows, kAligned>,
         grid_of(tiles, plan.split ? plan.leaves : 1),
         dim3(Shape::kThreads),
         Shape::kSmemBytes,
         stream,
         params,
         plan);
}

template <typename T, int kRows>
void tile_rows(const LinearParams& params, const GemmPlan& plan, CudaStream stream) {
  plan.aligned ? tile_rows<T, 2, kRows, true>(params, plan, stream)
               : tile_rows<T, 2, kRows, false>(params, plan, stream);
}

using LargeTile = TileShape<4, 128>;

template <typename T>
void large_tile_rows(const LinearParams& params, const GemmPlan& plan, CudaStream stream) {
  if (!plan.aligned) {
    throw std::invalid_argument("linear: the kernel tile_256x128 reads rows of x on 16 bytes only");
  }
  if (max_shared_bytes(stream) < LargeTile::kSmemBytes) {
    throw std::invalid_argument(
        "linear: the kernel tile_256x128 takes more shared memory than a "
        "block of this device may have");
  }
  tile_rows<T, 4, 128, true>(params, plan, stream);
}

// Returns whether tiles of 256 outputs finish earlier than tiles of 128. A large tile takes about
// 1.5 times as long as a small one, not twice as long, because it reads a quarter less from L2 per
// flop. A tile of either size occupies an SM alone.
bool large_tiles_pay(const LinearParams& params, CudaStream stream) {
  if (max_shared_bytes(stream) < LargeTile::kSmemBytes) return false;
  int64_t row_tiles = ceil_div(params.rows, 128);
  int64_t sms = num_sms(stream);
  int64_t large = ceil_div(row_tiles * ceil_div(params.weight.num_outputs, 256), sms);
  int64_t small = ceil_div(row_tiles * ceil_div(params.weight.num_outputs, 128), sms);
  return 3 * large <= 2 * small;
}

// Returns the fastest kernel for a shape. With two tiles per warp, both share the reads of x; with
// one, more SMs read weights, which is better if there are few outputs. From nine rows on, tiles of
// 128 outputs read x less often, and wide layers have enough of these tiles to fill the GPU.
LinearKernel suits(const LinearParams& params, const GemmPlan& plan, CudaStream stream) {
  int64_t groups = weight_groups(params.weight.num_outputs);
  if (params.rows <= 8) return groups < 96 ? LinearKernel::kStream16x8 : LinearKernel::kStream32x8;
  if (params.rows <= kLinearStreamRows && groups < 512) {
    return groups < 96 ? LinearKernel::kStream16x16 : LinearKernel::kStream32x16;
  }
  if (linear_tile_rows(params.rows) == 64) return LinearKernel::kTile128x64;
  bool large = !plan.split && plan.aligned && large_tiles_pay(params, stream);
  return large ? LinearKernel::kTile256x128 : LinearKernel::kTile128x128;
}

template <typename T>
void run(const LinearParams& params, const GemmPlan& plan, CudaStream stream) {
  LinearKernel kernel = params.kernel;
  if (kernel == LinearKernel::kByShape) kernel = suits(params, plan, stream);
  switch (kernel) {
    case LinearKernel::kStream16x8:
      return launch_stream<T, 1, 1>(params, plan, stream);
    case LinearKernel::kStream32x8:
      return launch_stream<T, 2, 1>(params, plan, stream);
    case LinearKernel::kStream16x16:
      return launch_stream<T, 1, 2>(params, plan, stream);
    case LinearKernel::kStream32x16:
      return launch_stream<T, 2, 2>(params, plan, stream);
    case LinearKernel::kTile128x64:
      return tile_rows<T, 64>(params, plan, stream);
    case LinearKernel::kTile256x128:
      return large_tile_rows<T>(params, plan, stream);
    default:
      return tile_rows<T, 128>(params, plan, stream);
  }
}

void run_float(const LinearParams& params, const GemmPlan& plan, CudaStream stream) {
  int slots = 4 / plan.leaves;
  int warps = slots * plan.leaves;
  launch(plan.aligned ? linear_float_kernel<true> : linear_float_kernel<false>,
         grid_of(ceil_div(weight_groups(params.weight.num_outputs), slots) *
                 ceil_div(params.rows, kFloatRows)),
         dim3(static_cast<unsigned>(warps * kWarpSize)),
         warps * kFloatRows * kWarpSize * sizeof(float),
         stream,
         params,
         plan);
}

}  // namespace

void pack_weight_cuda(const PackWeightParams& params, CudaStream stream) {
  if (params.dtype == DType::kBFloat16) return pack<bfloat16>(params, stream);
  if (params.dtype == DType::kFloat16) return pack<float16>(params, stream);
  if (params.dtype == DType::kFloat32) return pack<float>(params, stream);
  pack_codes_cuda(params, stream);
}

void linear_cuda(const LinearParams& params, CudaStream stream) {
  if (params.weight.kind != WeightKind::kPlain) return linear_codes_cuda(params, stream);
  bool split =
      linear_splits(
          params.rows, params.weight.num_outputs, params.weight.num_inputs, params.dtype) &&
      params.workspace_size >=
          linear_workspace_floats(params.rows, params.weight.num_outputs, params.weight.num_inputs);
  GemmPlan plan = plan_of(params, split);
  if (params.dtype == DType::kBFloat16) return run<bfloat16>(params, plan, stream);
  if (params.dtype == DType::kFloat16) return run<float16>(params, plan, stream);
  run_float(params, plan, stream);
}

}  // namespace specops
