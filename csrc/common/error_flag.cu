// SPDX-License-Identifier: Apache-2.0
#include "common/error_flag.h"
#include "common/launch.cuh"

namespace specops {
namespace {

__device__ int32_t error_code = 0;

__global__ void __launch_bounds__(1) take_error_kernel(TakeErrorParams params) {
  wait_for_previous_kernel();
  *params.out = atomicExch(params.error.code, 0);
}

}  // namespace

#if defined(SPECOPS_SIMT)
CudaKernels cuda_kernels() { return CudaKernels::kInterpreted; }
#else
CudaKernels cuda_kernels() { return CudaKernels::kOnGpu; }
#endif

ErrorFlag error_flag(int device) {
#if defined(SPECOPS_SIMT)
  static_cast<void>(device);
  return {&error_code};
#else
  constexpr int kMaxDevices = 64;
  static std::atomic<int32_t*> cached[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) throw std::runtime_error("specops: too many devices");
  int32_t* code = cached[device].load(std::memory_order_acquire);
  if (code == nullptr) {
    DeviceGuard guard(device);
    void* address = nullptr;
    RelaxedCapture relaxed;  // the first query loads the module
    check_cuda(cudaGetSymbolAddress(&address, error_code), "error_flag");
    code = static_cast<int32_t*>(address);
    cached[device].store(code, std::memory_order_release);
  }
  return {code};
#endif
}

int32_t take_error_sync(int device) {
  ErrorFlag flag = error_flag(device);
#if defined(SPECOPS_SIMT)
  int32_t code = *flag.code;
  *flag.code = 0;
#else
  DeviceGuard guard(device);
  int32_t code = 0;
  check_cuda(cudaDeviceSynchronize(), "check_errors");
  check_cuda(cudaMemcpy(&code, flag.code, sizeof code, cudaMemcpyDeviceToHost), "check_errors");
  if (code != 0) {
    // Synchronize: cudaMemset waits neither for the host nor for other streams, so it could
    // otherwise erase the error of a kernel that is launched after this call.
    check_cuda(cudaMemset(flag.code, 0, sizeof code), "check_errors");
    check_cuda(cudaDeviceSynchronize(), "check_errors");
  }
#endif
  return code;
}

void take_error_cuda(const TakeErrorParams& params, CudaStream stream) {
  launch(take_error_kernel, 1, 1, 0, stream, params);
}

}  // namespace specops
