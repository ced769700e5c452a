// SPDX-License-Identifier: Apache-2.0
// Which instruction set the CPU kernels run on, chosen once at run time. A kernel file is compiled
// once per instruction set, each time into a namespace of that name (see CMakeLists.txt).
#pragma once

#if defined(SPECOPS_SIMT)
#include <stdexcept>
#endif

namespace specops {

enum class Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3 };

const char* isa_name(Isa isa);
bool isa_supported(Isa isa);  // compiled in, and this CPU has it
Isa active_isa();             // the best supported one unless set_isa() chose another
void set_isa(Isa isa);        // for tests and benches; the caller checks isa_supported()

}  // namespace specops

// Declares a CPU launcher: the variants, and the function that picks one.
#if defined(SPECOPS_SIMT)
// The interpreter's module has CUDA kernels alone (csrc/simt).
#define SPECOPS_DECLARE_CPU(fn, Params)                                 \
  inline void fn(const Params& /*params*/) {                            \
    throw std::logic_error(#fn ": the interpreter has no CPU kernels"); \
  }                                                                     \
  static_assert(true, "a semicolon follows")
#elif defined(SPECOPS_ISA)
// A kernel file defines its own variant.
#define SPECOPS_DECLARE_CPU(fn, Params) \
  namespace SPECOPS_ISA {               \
  void fn(const Params& params);        \
  }                                     \
  static_assert(true, "a semicolon follows")
#elif defined(__x86_64__)
// Weak: a build may leave variants out (SPECOPS_ISAS), and no other object file depends on which.
// isa_supported() knows them, so that none is called which is not there.
#define SPECOPS_DECLARE_CPU(fn, Params)                \
  namespace portable {                                 \
  void fn(const Params& params);                       \
  }                                                    \
  namespace avx2 {                                     \
  __attribute__((weak)) void fn(const Params& params); \
  }                                                    \
  namespace avx512 {                                   \
  __attribute__((weak)) void fn(const Params& params); \
  }                                                    \
  namespace avx512_bf16 {                              \
  __attribute__((weak)) void fn(const Params& params); \
  }                                                    \
  inline void fn(const Params& params) {               \
    switch (active_isa()) {                            \
      case Isa::kAvx512Bf16:                           \
        return avx512_bf16::fn(params);                \
      case Isa::kAvx512:                               \
        return avx512::fn(params);                     \
      case Isa::kAvx2:                                 \
        return avx2::fn(params);                       \
      default:                                         \
        return portable::fn(params);                   \
    }                                                  \
  }                                                    \
  static_assert(true, "a semicolon follows")
#else
#define SPECOPS_DECLARE_CPU(fn, Params)                                 \
  namespace portable {                                                  \
  void fn(const Params& params);                                        \
  }                                                                     \
  inline void fn(const Params& params) { return portable::fn(params); } \
  static_assert(true, "a semicolon follows")
#endif
