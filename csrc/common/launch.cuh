// SPDX-License-Identifier: Apache-2.0
// The one way to start a kernel, under nvcc and in the interpreter.
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

// Runs every block of the grid; returns when all are done.
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

// Of the machine the grids are sized for.
inline int num_sms(CudaStream /*stream*/) { return simt::num_sms(); }

// What a block may ask for.
inline int max_shared_bytes(CudaStream /*stream*/) { return simt::settings.max_shared_bytes; }

// What an SM has for all its blocks.
inline int sm_shared_bytes(CudaStream /*stream*/) { return 228 << 10; }

#else

inline void check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // it is told here, and not once more to whoever asks next
  throw std::runtime_error(std::string("specops: ") + what + ": " + cudaGetErrorString(error));
}

// Makes a device current for the life of the guard.
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

// Lets this thread ask the driver about kernels while it captures, for the life of the guard: the
// first look at one loads it, which a capture in global mode forbids and is ended by.
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

// What is known of each kernel on each device.
//
// Dynamic shared memory: the limit is only ever raised, since a captured launch needs what it asked
// for when its graph is instantiated, which may be after a smaller launch of the same kernel.
//
// Overlap: from sm_90 on a kernel may be started before the one ahead of it in the stream has ended,
// if it waits for that itself. All of ours do (wait_for_previous_kernel), where they are compiled
// for sm_90 or newer: what the driver makes for such a GPU from older PTX does not wait.
class KernelStates {
 public:
  // Lets a kernel take so many bytes on the current device, which is `device`. The driver is told
  // under the lock, or of two threads that raise a limit the lower one could come last.
  void raise(const void* kernel, int device, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t& raised = states_[{kernel, device}].raised;
    if (bytes <= raised) return;
    RelaxedCapture relaxed;
    cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    check_cuda(error, "cudaFuncSetAttribute");
    // All that an SM can give, not what one block needs: as many blocks as fit then run at once.
    error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    check_cuda(error, "cudaFuncSetAttribute");
    raised = bytes;
  }

  // Whether a kernel waits by itself, as compiled for the current device, which is `device`.
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
    int ptx_version = 0;  // 0: not asked for yet
  };

  std::mutex mutex_;
  std::map<std::pair<const void*, int>, State> states_;
};

// Of this process, and never destroyed: something may be launched while it ends.
inline KernelStates& kernel_states() {
  static KernelStates& states = *new KernelStates;
  return states;
}

// Starts a kernel on the stream; a grid with an empty side starts nothing.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...),
            dim3 grid,
            dim3 block,
            size_t smem_bytes,
            CudaStream stream,
            const Args&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  constexpr size_t kUnaskedBytes = 48 << 10;  // above it a kernel must ask
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
  // Asked whether it counts or not: a kernel's first launch finds it loaded.
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

// An attribute of the stream's device, asked for once.
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
