// SPDX-License-Identifier: Apache-2.0
// Events that the machine reports to the race detector (detector.cpp). The functions do nothing
// outside race builds.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simt/machine.h"

namespace specops::simt::detector {

#if defined(SPECOPS_SIMT_RACE)

void begin_launch(int threads,
                  const unsigned char* stacks,
                  size_t stacks_bytes,
                  const unsigned char* arena_end);
void begin_block(const unsigned char* arena, size_t smem_bytes);
void sync_lanes(int warp, uint32_t mask);  // these lanes have synchronized, with memory ordering
void arrive(int barrier,
            int thread);  // the thread arrives: its earlier accesses come before the barrier
void pass(int barrier,
          int thread);                           // the thread continues after the barrier
void reset(int barrier);                         // all threads have passed the barrier
void issue(const void* smem, const Site& site);  // a cp.async to these 16 bytes has started
void land(const void* smem,
          const Site& site);  // the bytes have arrived, as if this thread had written them

#else

inline void begin_launch(int, const unsigned char*, size_t, const unsigned char*) {}
inline void begin_block(const unsigned char*, size_t) {}
inline void sync_lanes(int, uint32_t) {}
inline void arrive(int, int) {}
inline void pass(int, int) {}
inline void reset(int) {}
inline void issue(const void*, const Site&) {}
inline void land(const void*, const Site&) {}

#endif

}  // namespace specops::simt::detector
