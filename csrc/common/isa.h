// SPDX-License-Identifier: Apache-2.0
// Which instruction set the CPU kernels run on, chosen once at run time. A kernel file is compiled
// once per instruction set, each time into a namespace of that name (see CMakeLists.txt).
#pragma once

#if !defined(SPECOPS_ISA)
#include <stdexcept>
#include <string>
#endif

namespace specops {

enum class Isa : int { kPortable = 0, kAvx2 = 1, kAvx512 = 2, kAvx512Bf16 = 3, kAmx = 4 };

const char* isa_name(Isa isa);
bool isa_supported(Isa isa);  // compiled in, this CPU has it, and the system lets us use it
Isa active_isa();             // the best supported one unless set_isa() chose another
void set_isa(Isa isa);        // for tests and benches; the caller checks isa_supported()

}  // namespace specops

// Declares a CPU launcher: the variants, and the function that picks one.
#if defined(SPECOPS_ISA)
// A kernel file defines its own variant.
#define SPECOPS_DECLARE_CPU(fn, Params) \
  namespace SPECOPS_ISA {               \
  void fn(const Params& params);        \
  }                                     \
  static_assert(true, "a semicolon follows")
#else

namespace specops {

// The variants of a launcher, by Isa; nullptr where a module has none.
template <typename Params>
using CpuVariants = void (*const[5])(const Params& params);

// Runs that of the active instruction set. A build may leave sets out (SPECOPS_ISAS), and
// isa_supported() knows them; avx512_bf16 and amx have variants only of the files with such
// instructions, and the set before them serves the others.
template <typename Params>
void run_variant(const char* op, const CpuVariants<Params>& variants, const Params& params) {
  int isa = static_cast<int>(active_isa());
  while (isa > static_cast<int>(Isa::kAvx512) && variants[isa] == nullptr) --isa;
  if (variants[isa] == nullptr) {
    throw std::logic_error(std::string(op) + ": this module has no CPU kernels");
  }
  variants[isa](params);
}

}  // namespace specops

// Weak: no object file depends on which variants there are, nor on whether there are any: the
// interpreter's module has CUDA kernels alone (csrc/simt).
#define SPECOPS_DECLARE_VARIANT(isa, fn, Params)       \
  namespace isa {                                      \
  __attribute__((weak)) void fn(const Params& params); \
  }
#if defined(__x86_64__)
#define SPECOPS_DECLARE_CPU(fn, Params)                                               \
  SPECOPS_DECLARE_VARIANT(portable, fn, Params)                                       \
  SPECOPS_DECLARE_VARIANT(avx2, fn, Params)                                           \
  SPECOPS_DECLARE_VARIANT(avx512, fn, Params)                                         \
  SPECOPS_DECLARE_VARIANT(avx512_bf16, fn, Params)                                    \
  SPECOPS_DECLARE_VARIANT(amx, fn, Params)                                            \
  inline void fn(const Params& params) {                                              \
    run_variant<Params>(                                                              \
        #fn, {portable::fn, avx2::fn, avx512::fn, avx512_bf16::fn, amx::fn}, params); \
  }                                                                                   \
  static_assert(true, "a semicolon follows")
#else
#define SPECOPS_DECLARE_CPU(fn, Params)                                                      \
  SPECOPS_DECLARE_VARIANT(portable, fn, Params)                                              \
  inline void fn(const Params& params) { run_variant<Params>(#fn, {portable::fn}, params); } \
  static_assert(true, "a semicolon follows")
#endif
#endif
