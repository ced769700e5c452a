// SPDX-License-Identifier: Apache-2.0
// Launches through csrc/common/launch.cuh, compiled as nvcc does, over a fake CUDA runtime
// (tests/fake_cuda). The runtime limits shared memory as the driver does and records which launches
// may overlap. Prints errors.
#include <cstdint>
#include <cstdio>

#include "common/launch.cuh"

namespace {

using fake_cuda::driver;

int problems = 0;

void expect(bool is_so, const char* what) {
  if (is_so) return;
  std::printf("not so: %s\n", what);
  ++problems;
}

void first_kernel(int) {}
void second_kernel(int) {}
using Kernel = void (*)(int);

// Returns whether the kernel could be launched.
bool start(Kernel kernel, size_t smem_bytes, int device) {
  try {
    specops::launch(kernel, dim3(4), dim3(128), smem_bytes, {nullptr, device}, 1);
  } catch (const std::runtime_error&) {
    return false;
  }
  return true;
}

size_t limit_of(Kernel kernel, int device) {
  return driver.limits[{reinterpret_cast<const void*>(kernel), device}];
}

void captured_launches_keep_their_room() {
  driver.is_capturing = true;
  start(first_kernel, 200 << 10, 0);
  driver.is_capturing = false;
  expect(start(first_kernel, 64 << 10, 0), "a smaller launch works");
  expect(start(first_kernel, 16 << 10, 0), "a small launch works");
  expect(driver.instantiate(), "a graph can be instantiated after smaller launches");
  expect(limit_of(first_kernel, 0) == 200 << 10, "a smaller launch leaves the limit alone");
}

// The kernels and devices have not been used before.
void a_first_launch_may_be_captured() {
  driver.ptx_versions[9] = 90;
  driver.is_capturing = true;
  expect(start(first_kernel, 0, 8), "a first launch is captured");
  expect(start(second_kernel, 100 << 10, 8), "and one that asks for room");
  specops::kernels_overlap = false;
  expect(start(first_kernel, 0, 9), "and one that may not overlap");
  specops::kernels_overlap = true;
  driver.is_capturing = false;
  expect(driver.instantiate(), "a capture outlives first launches");
  expect(fake_cuda::capture_mode == cudaStreamCaptureModeGlobal, "the capture's mode is put back");
  driver.is_capturing = true;
  start(first_kernel, 300 << 10, 8);
  driver.is_capturing = false;
  expect(fake_cuda::capture_mode == cudaStreamCaptureModeGlobal, "after an error as well");
}

void the_driver_is_asked_once() {
  int before = driver.times_set;
  for (int i = 0; i < 5; ++i) start(first_kernel, 200 << 10, 0);
  start(first_kernel, 8 << 10, 0);
  expect(driver.times_set == before, "the driver is not told again what it knows");
}

void kernels_and_devices_are_apart() {
  start(second_kernel, 100 << 10, 0);
  start(first_kernel, 100 << 10, 1);
  start(second_kernel, 40 << 10, 1);
  expect(limit_of(second_kernel, 0) == 100 << 10, "another kernel has its own limit");
  expect(limit_of(first_kernel, 1) == 100 << 10, "another device has its own limit");
  expect(limit_of(second_kernel, 1) == 0, "up to 48 KiB no limit is raised");
  expect(fake_cuda::current_device == 0, "the current device is put back");
}

void what_is_refused_is_not_remembered() {
  expect(!start(second_kernel, 300 << 10, 0), "more than a block can have is an error");
  expect(!start(second_kernel, 300 << 10, 0), "and is one again");
  expect(start(second_kernel, 120 << 10, 0), "what fits is launched after it");
  expect(limit_of(second_kernel, 0) == 120 << 10, "with room for it");
}

bool overlaps(Kernel kernel, int device) {
  start(kernel, 0, device);
  return driver.last_overlaps;
}

void only_kernels_that_wait_overlap() {
  driver.ptx_versions = {{4, 90}, {5, 80}, {6, 100}};
  expect(overlaps(first_kernel, 4), "what is compiled for sm_90 overlaps");
  expect(overlaps(first_kernel, 6), "what is compiled for newer devices overlaps");
  expect(!overlaps(first_kernel, 5), "what is made from older PTX does not overlap");
  expect(overlaps(second_kernel, 4), "every kernel is asked for itself");
  int before = driver.times_asked;
  for (int i = 0; i < 5; ++i) start(first_kernel, 60 << 10, 4);
  expect(driver.times_asked == before, "what a kernel is compiled for is asked once");
  expect(driver.last_overlaps, "a kernel with a raised limit overlaps");
  specops::kernels_overlap = false;
  expect(!overlaps(first_kernel, 4), "nothing overlaps when it is switched off");
  specops::kernels_overlap = true;
  expect(overlaps(first_kernel, 4), "and it does again when switched on");
}

void threads_never_lower_a_limit() {
  constexpr int kThreads = 8, kLaunches = 400;
  int before = driver.num_launches;
  std::atomic<int> refused{0};
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread) {
    threads.emplace_back([&refused, thread] {
      uint32_t state = thread + 1;
      auto random = [&state] { return (state = 1664525 * state + 1013904223) >> 8; };
      for (int i = 0; i < kLaunches; ++i) {
        // Sizes mostly rise, so that the limits are raised throughout.
        size_t bytes = (50 << 10) + 400 * i + random() % 20000;
        Kernel kernel = random() % 2 ? first_kernel : second_kernel;
        refused += start(kernel, bytes, 2 + random() % 2) ? 0 : 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  expect(refused == 0, "every launch finds the room it asked for");
  expect(driver.num_launches == before + kThreads * kLaunches, "every launch is started");
  expect(driver.times_lowered == 0, "no limit is ever lowered");
}

}  // namespace

int main() {
  captured_launches_keep_their_room();
  a_first_launch_may_be_captured();
  the_driver_is_asked_once();
  kernels_and_devices_are_apart();
  what_is_refused_is_not_remembered();
  only_kernels_that_wait_overlap();
  threads_never_lower_a_limit();
  int sms = specops::num_sms({nullptr, 0});
  expect(sms == 132 && specops::max_shared_bytes({nullptr, 0}) == 227 << 10, "attributes");
  expect(specops::sm_shared_bytes({nullptr, 0}) == 228 << 10, "what an SM has");
  return problems == 0 ? 0 : 1;
}
