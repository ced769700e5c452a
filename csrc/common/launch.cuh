// SPDX-License-Identifier: Apache-2.0
// Kernel launches, both under nvcc and in the interpreter.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

#include "common/device.cuh"

namespace specops {

#if defined(SPECOPS_SIMT)

// Runs all blocks of the grid, then returns (the interpreter's kernel launch).
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...),
            dim3 grid,
            dim3 block,
            size_t smem_bytes,
            CudaStream /*stream*/,
            const Args&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  std::tuple<Params...> arguments(args...);
  simt::run(grid, block, smem_bytes, simt::kernel_name<Params...>(), [&] {
    std::apply(kernel, arguments);
  });
}

// Returns the number of SMs of the simulated device.
inline int num_sms(CudaStream /*stream*/) { return simt::num_sms(); }

// Returns the largest amount of shared memory that a block may request.
inline int max_shared_bytes(CudaStream /*stream*/) { return simt::settings.max_shared_bytes; }

// Returns the shared memory of an SM, which all of its blocks share.
inline int sm_shared_bytes(CudaStream /*stream*/) { return 228 << 10; }

#else

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clear it: otherwise a later call would report it again
  throw std::runtime_error(std::string("specops: ") + what + ": " + cudaGetErrorString(error));
}

// Makes a device current for the lifetime of the guard.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    changed_ = before_ != device;
    if (changed_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Lets this thread query kernels during graph capture, for the lifetime of the guard. The first
// query of a kernel loads the kernel, which is forbidden in global capture mode and would end the
// capture.
class RelaxedCapture {
 public:
  RelaxedCapture() {
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode_), "cudaThreadExchangeStreamCaptureMode");
  }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// State of each kernel on each device.
//
// Dynamic shared memory: the limit is never lowered. A captured launch needs the limit that it
// requested when its graph is instantiated, and that may happen after a smaller launch of the same
// kernel.
//
// Overlap: from sm_90 on, a kernel may start before the previous kernel in the stream has ended, if
// the kernel itself waits for the previous one. All kernels here wait (wait_for_previous_kernel) if
// they are compiled for sm_90 or newer; code that the driver compiles for such a GPU from older PTX
// does not.
class KernelStates {
 public:
  // Allows a kernel `bytes` of dynamic shared memory on the current device, which is `device`. The
  // driver is called inside the lock; otherwise, if two threads raise the limit, the lower value
  // could be set last.
  void raise(const void* kernel, int device, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t& raised = states_[{kernel, device}].raised;
    if (bytes <= raised) return;
    RelaxedCapture relaxed;
    cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    check_cuda(error, "cudaFuncSetAttribute");
    // Request the shared memory of a whole SM instead of what one block needs, so that as many
    // blocks as fit can run at once.
    error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    check_cuda(error, "cudaFuncSetAttribute");
    raised = bytes;
  }

  // Returns whether the code of a kernel on the current device `device` waits for the previous
  // kernel.
  bool waits(const void* kernel, int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    int& ptx_version = states_[{kernel, device}].ptx_version;
    if (ptx_version == 0) {
      RelaxedCapture relaxed;
      cudaFuncAttributes attributes{};
      check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
      ptx_version = attributes.ptxVersion;
    }
    return ptx_version >= 90;
  }

 private:
  struct State {
    size_t raised = 0;
    int ptx_version = 0;  // 0: not queried yet
  };

  std::mutex mutex_;
  std::map<std::pair<const void*, int>, State> states_;
};

// Returns the process-wide instance. It is never destroyed, because kernels may be launched during
// process exit.
inline KernelStates& kernel_states() {
  static KernelStates& states = *new KernelStates;
  return states;
}

// Launches a kernel on the stream. Does nothing if the grid is empty.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...),
            dim3 grid,
            dim3 block,
            size_t smem_bytes,
            CudaStream stream,
            const Args&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  constexpr size_t kUnaskedBytes = 48 << 10;  // larger sizes must be requested
  DeviceGuard guard(stream.device);
  const void* entry = reinterpret_cast<const void*>(kernel);
  if (smem_bytes > kUnaskedBytes) kernel_states().raise(entry, stream.device, smem_bytes);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &overlap;
  // Queried even if not needed, so that the first launch of a kernel always loads it.
  bool waits = kernel_states().waits(entry, stream.device);
  config.numAttrs = waits && kernels_overlap.load(std::memory_order_relaxed) ? 1 : 0;
  std::tuple<Params...> arguments(args...);
  cudaError_t error = std::apply(
      [&](auto&... argument) {
        void* pointers[] = {static_cast<void*>(&argument)...};
        return cudaLaunchKernelExC(&config, entry, pointers);
      },
      arguments);
  check_cuda(error, "launch");
}

// Returns an attribute of the stream's device; the driver is queried only once.
template <cudaDeviceAttr kAttribute>
int device_attribute(CudaStream stream) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> cached[kMaxDevices];
  std::atomic<int>& value = cached[stream.device % kMaxDevices];
  if (value.load(std::memory_order_relaxed) == 0) {
    int found = 0;
    check_cuda(cudaDeviceGetAttribute(&found, kAttribute, stream.device), "cudaDeviceGetAttribute");
    value.store(found, std::memory_order_relaxed);
  }
  return value.load(std::memory_order_relaxed);
}

inline int num_sms(CudaStream stream) {
  return device_attribute<cudaDevAttrMultiProcessorCount>(stream);
}

inline int max_shared_bytes(CudaStream stream) {
  return device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(stream);
}

inline int sm_shared_bytes(CudaStream stream) {
  return device_attribute<cudaDevAttrMaxSharedMemoryPerMultiprocessor>(stream);
}

#endif

}  // namespace specops
