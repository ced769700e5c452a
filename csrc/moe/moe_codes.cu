// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "moe/moe_linear.cuh"

namespace specops {
namespace {

using Few = CodeShape<4, 1, 1>;
using Halves = CodeShape<1, 4, 1, true>;  // pieces of 16 inputs

template <typename Codes, typename Numbers, typename Shape>
void run(const MoeLinearParams& params, CudaStream stream) {
  CodePlan plan = code_plan<Codes>(params);
  int64_t row_tiles = most_row_tiles(params.rows, params.num_experts);
  int64_t output_tiles = (params.weight.num_outputs + Shape::kOutputs - 1) / Shape::kOutputs;
  launch(moe_codes_kernel<Codes, Numbers, Shape>,
         dim3(static_cast<unsigned>(row_tiles * output_tiles)),
         dim3(Shape::kThreads),
         code_bytes<Codes, Numbers, Shape>(plan),
         stream,
         params,
         plan,
         row_tiles);
}

}  // namespace

void moe_codes_cuda(const MoeLinearParams& params, CudaStream stream) {
  with_codes(params, [&]<typename Codes, typename Numbers>() {
    if constexpr (!Numbers::kIsFloat) {
      if (params.weight.group % 32 != 0) return run<Codes, Numbers, Halves>(params, stream);
    }
    run<Codes, Numbers, Few>(params, stream);
  });
}

}  // namespace specops
