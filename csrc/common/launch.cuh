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
inline int max_shared_bytes(CudaStream /*stream*/) { return simt::kMaxSharedBytes; }

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

// How much dynamic shared memory each kernel may take on each device. It is only ever raised: a
// captured launch needs what it asked for when its graph is instantiated, which may be after a
// smaller launch of the same kernel.
class SharedLimits {
 public:
  // Lets a kernel take so many bytes on the current device, which is `device`. The driver is told
  // under the lock, or of two threads that raise a limit the lower one could come last.
  void raise(const void* kernel, int device, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    size_t& raised = raised_[{kernel, device}];
    if (bytes <= raised) return;
    cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
    check_cuda(error, "cudaFuncSetAttribute");
    raised = bytes;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<const void*, int>, size_t> raised_;
};

// Of this process, and never destroyed: something may be launched while it ends.
inline SharedLimits& shared_limits() {
  static SharedLimits& limits = *new SharedLimits;
  return limits;
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
  if (smem_bytes > kUnaskedBytes) shared_limits().raise(entry, stream.device, smem_bytes);
  std::tuple<Params...> arguments(args...);
  cudaError_t error = std::apply(
      [&](auto&... argument) {
        void* pointers[] = {static_cast<void*>(&argument)...};
        return cudaLaunchKernel(
            entry, grid, block, pointers, smem_bytes, static_cast<cudaStream_t>(stream.handle));
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

#endif

}  // namespace specops
