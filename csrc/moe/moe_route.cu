// SPDX-License-Identifier: Apache-2.0
#include "common/launch.cuh"
#include "moe/moe_route.cuh"

namespace specops {

void moe_route_cuda(const MoeRouteParams& params, CudaStream stream) {
  launch(moe_route_kernel,
         dim3(static_cast<unsigned>((params.rows + kRouteWarps - 1) / kRouteWarps)),
         dim3(kRouteWarps * kWarpSize),
         kRouteWarps * sizeof(RouteRow),
         stream,
         params);
}

}  // namespace specops
