// SPDX-License-Identifier: Apache-2.0
// Fake CUDA runtime for csrc/common/launch.cuh, in place of common/device.cuh: the driver's limits
// of shared memory, the architectures that kernels were compiled for, launches, and a stream that
// can be captured. No kernel runs.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "common/cuda_stream.h"

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x_size = 1, unsigned y_size = 1, unsigned z_size = 1)  // NOLINT: as in CUDA
      : x(x_size), y(y_size), z(z_size) {}
};

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorStreamCaptureUnsupported = 900,
};
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeRelaxed = 2 };
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};
constexpr int cudaSharedmemCarveoutMaxShared = 100;
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
using cudaStream_t = void*;

struct cudaFuncAttributes {
  int ptxVersion;
};
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

namespace fake_cuda {

constexpr size_t kUnaskedBytes = 48 << 10;
constexpr size_t kMostBytes = 227 << 10;

struct Launch {
  const void* kernel;
  int device;
  size_t smem_bytes;
  bool overlaps;
};

struct Driver {
  std::mutex mutex;
  std::map<std::pair<const void*, int>, size_t> limits;  // by kernel and device
  std::vector<Launch> captured;
  bool is_capturing = false;
  bool is_broken = false;                        // a forbidden call has invalidated the capture
  std::set<std::pair<const void*, int>> loaded;  // kernels that have been queried
  int times_set = 0;
  int times_lowered = 0;
  int num_launches = 0;
  std::map<int, int> ptx_versions;  // by device, for all kernels; default 80
  int times_asked = 0;
  bool last_overlaps = false;

  bool has_room(const Launch& launch) {
    size_t limit = limits[{launch.kernel, launch.device}];
    return launch.smem_bytes <= (limit > kUnaskedBytes ? limit : kUnaskedBytes);
  }

  // Returns whether this thread may call functions that can load a kernel. If the capture mode
  // forbids it, the capture is invalidated.
  bool may_load(cudaStreamCaptureMode mode) {
    if (!is_capturing || mode == cudaStreamCaptureModeRelaxed) return true;
    is_broken = true;
    return false;
  }

  // Checks every node against the current limits, as cudaGraphInstantiate does.
  bool instantiate() {
    std::lock_guard<std::mutex> lock(mutex);
    for (const Launch& launch : captured) {
      if (!has_room(launch)) return false;
    }
    return !is_broken;
  }
};

inline Driver driver;
inline thread_local int current_device = 0;
inline thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

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
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, fake_cuda::capture_mode);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  constexpr int kMost = static_cast<int>(fake_cuda::kMostBytes);
  *value = attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin       ? kMost
           : attribute == cudaDevAttrMaxSharedMemoryPerMultiprocessor ? kMost + (1 << 10)
                                                                      : 132;
  return cudaSuccess;
}

inline cudaError_t cudaFuncSetAttribute(const void* kernel,
                                        cudaFuncAttribute attribute,
                                        int value) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) {
    return value == cudaSharedmemCarveoutMaxShared ? cudaSuccess : cudaErrorInvalidValue;
  }
  if (static_cast<size_t>(value) > fake_cuda::kMostBytes) return cudaErrorInvalidValue;
  std::this_thread::yield();  // exposes a caller that decides without a lock
  fake_cuda::Driver& driver = fake_cuda::driver;
  std::lock_guard<std::mutex> lock(driver.mutex);
  if (!driver.may_load(fake_cuda::capture_mode)) return cudaErrorStreamCaptureUnsupported;
  size_t& limit = driver.limits[{kernel, fake_cuda::current_device}];
  driver.times_lowered += static_cast<size_t>(value) < limit ? 1 : 0;
  ++driver.times_set;
  limit = static_cast<size_t>(value);
  return cudaSuccess;
}

inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  fake_cuda::Driver& driver = fake_cuda::driver;
  std::lock_guard<std::mutex> lock(driver.mutex);
  if (!driver.may_load(fake_cuda::capture_mode)) return cudaErrorStreamCaptureUnsupported;
  driver.loaded.insert({kernel, fake_cuda::current_device});
  ++driver.times_asked;
  auto found = driver.ptx_versions.find(fake_cuda::current_device);
  attributes->ptxVersion = found == driver.ptx_versions.end() ? 80 : found->second;
  return cudaSuccess;
}

inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config,
                                       const void* kernel,
                                       void**) {
  fake_cuda::Driver& driver = fake_cuda::driver;
  std::lock_guard<std::mutex> lock(driver.mutex);
  bool overlaps = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    overlaps |= config->attrs[i].val.programmaticStreamSerializationAllowed != 0;
  }
  fake_cuda::Launch launch{kernel, fake_cuda::current_device, config->dynamicSmemBytes, overlaps};
  bool is_new = driver.loaded.insert({kernel, fake_cuda::current_device}).second;
  if (is_new && !driver.may_load(fake_cuda::capture_mode)) return cudaErrorStreamCaptureUnsupported;
  if (!driver.has_room(launch)) return cudaErrorInvalidValue;
  if (driver.is_capturing) driver.captured.push_back(launch);
  driver.last_overlaps = overlaps;
  ++driver.num_launches;
  return cudaSuccess;
}
