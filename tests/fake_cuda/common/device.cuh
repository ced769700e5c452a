// SPDX-License-Identifier: Apache-2.0
// The CUDA runtime as csrc/common/launch.cuh sees it, in the place of common/device.cuh: limits of
// shared memory as the driver keeps them, launches, and a stream that can be captured. No kernel runs.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "common/cuda_stream.h"

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1)  // NOLINT: as in CUDA
      : x(x_size), y(y_size), z(z_size) {}
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
using cudaStream_t = void*;

namespace fake_cuda {

constexpr size_t kUnaskedBytes = 48 << 10;
constexpr size_t kMostBytes = 227 << 10;

struct Launch {
  const void* kernel;
  int device;
  size_t smem_bytes;
};

struct Driver {
  std::mutex mutex;
  std::map<std::pair<const void*, int>, size_t> limits;  // by kernel and device
  std::vector<Launch> captured;
  bool is_capturing = false;
  int times_set = 0;
  int times_lowered = 0;
  int num_launches = 0;

  bool has_room(const Launch& launch) {
    size_t limit = limits[{launch.kernel, launch.device}];
    return launch.smem_bytes <= (limit > kUnaskedBytes ? limit : kUnaskedBytes);
  }

  // As cudaGraphInstantiate does, every node is judged by the limits of that moment.
  bool instantiate() {
    std::lock_guard<std::mutex> lock(mutex);
    for (const Launch& launch : captured) {
      if (!has_room(launch)) return false;
    }
    return true;
  }
};

inline Driver driver;
inline thread_local int current_device = 0;

}  // namespace fake_cuda

inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid argument";
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = fake_cuda::current_device;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  fake_cuda::current_device = device;
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  bool is_memory = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin;
  *value = is_memory ? static_cast<int>(fake_cuda::kMostBytes) : 132;
  return cudaSuccess;
}

inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  if (static_cast<size_t>(value) > fake_cuda::kMostBytes) return cudaErrorInvalidValue;
  std::this_thread::yield();  // whoever decided without a lock is overtaken here
  fake_cuda::Driver& driver = fake_cuda::driver;
  std::lock_guard<std::mutex> lock(driver.mutex);
  size_t& limit = driver.limits[{kernel, fake_cuda::current_device}];
  driver.times_lowered += static_cast<size_t>(value) < limit ? 1 : 0;
  ++driver.times_set;
  limit = static_cast<size_t>(value);
  return cudaSuccess;
}

inline cudaError_t cudaLaunchKernel(
    const void* kernel, dim3, dim3, void** /*args*/, size_t smem_bytes, cudaStream_t) {
  fake_cuda::Driver& driver = fake_cuda::driver;
  std::lock_guard<std::mutex> lock(driver.mutex);
  fake_cuda::Launch launch{kernel, fake_cuda::current_device, smem_bytes};
  if (!driver.has_room(launch)) return cudaErrorInvalidValue;
  if (driver.is_capturing) driver.captured.push_back(launch);
  ++driver.num_launches;
  return cudaSuccess;
}
