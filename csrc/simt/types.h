// SPDX-License-Identifier: Apache-2.0
// Definitions of CUDA's function qualifiers and vector types for g++.
#pragma once

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __grid_constant__
#define __noinline__

#define SPECOPS_SIMT_VECTOR2(name, type, alignment) \
  struct alignas(alignment) name {                  \
    type x, y;                                      \
  };                                                \
  constexpr name make_##name(type x, type y) { return {x, y}; }
#define SPECOPS_SIMT_VECTOR3(name, type) \
  struct name {                          \
    type x, y, z;                        \
  };                                     \
  constexpr name make_##name(type x, type y, type z) { return {x, y, z}; }
#define SPECOPS_SIMT_VECTOR4(name, type, alignment) \
  struct alignas(alignment) name {                  \
    type x, y, z, w;                                \
  };                                                \
  constexpr name make_##name(type x, type y, type z, type w) { return {x, y, z, w}; }

SPECOPS_SIMT_VECTOR2(uchar2, unsigned char, 2)
SPECOPS_SIMT_VECTOR2(ushort2, unsigned short, 4)
SPECOPS_SIMT_VECTOR2(int2, int, 8)
SPECOPS_SIMT_VECTOR2(uint2, unsigned, 8)
SPECOPS_SIMT_VECTOR2(float2, float, 8)
SPECOPS_SIMT_VECTOR2(longlong2, long long, 16)
SPECOPS_SIMT_VECTOR2(ulonglong2, unsigned long long, 16)
SPECOPS_SIMT_VECTOR2(double2, double, 16)
SPECOPS_SIMT_VECTOR3(int3, int)
SPECOPS_SIMT_VECTOR3(uint3, unsigned)
SPECOPS_SIMT_VECTOR3(float3, float)
SPECOPS_SIMT_VECTOR4(uchar4, unsigned char, 4)
SPECOPS_SIMT_VECTOR4(ushort4, unsigned short, 8)
SPECOPS_SIMT_VECTOR4(int4, int, 16)
SPECOPS_SIMT_VECTOR4(uint4, unsigned, 16)
SPECOPS_SIMT_VECTOR4(float4, float, 16)

#undef SPECOPS_SIMT_VECTOR2
#undef SPECOPS_SIMT_VECTOR3
#undef SPECOPS_SIMT_VECTOR4

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// Indices of the running thread; the machine sets them whenever it switches threads.
extern uint3 threadIdx;
extern uint3 blockIdx;
extern dim3 blockDim;
extern dim3 gridDim;
constexpr int warpSize = 32;
