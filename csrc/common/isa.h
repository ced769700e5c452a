// SPDX-License-Identifier: Apache-2.0
// Which instruction set the CPU kernels run on, chosen once at run time. A kernel file is compiled
// once per instruction set, each time into a namespace of that name (see CMakeLists.txt).
#pragma once

#if !defined(SPECOPS_ISA)
#include <stdexcept>
#include <string>
#endif

namespace specops {

enum class Isa : int { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmx, kNeon, kNeonBf16 };
constexpr int kNumIsas = 7;

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
using CpuVariants = void (*const[kNumIsas])(const Params& params);

// The set that serves another one for files of which that has no variant; itself: none does.
constexpr Isa lender_of(Isa isa) {
  switch (isa) {
    case Isa::kAmx:
      return Isa::kAvx512Bf16;
    case Isa::kAvx512Bf16:
      return Isa::kAvx512;
    case Isa::kNeonBf16:
      return Isa::kNeon;
    default:
      return isa;
  }
}

// Runs that of the active instruction set. A build may leave sets out (SPECOPS_ISAS), and
// isa_supported() knows them; sets that add to another one have variants only of the files with
// instructions of their own.
template <typename Params>
void run_variant(const char* op, const CpuVariants<Params>& variants, const Params& params) {
  Isa isa = active_isa();
  auto variant = variants[static_cast<int>(isa)];
  while (variant == nullptr && lender_of(isa) != isa) {
    isa = lender_of(isa);
    variant = variants[static_cast<int>(isa)];
  }
  if (variant == nullptr) {
    throw std::logic_error(std::string(op) +
                           ": this build has no kernels for this CPU (SPECOPS_ISAS=all has them)");
  }
  variant(params);
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
#elif defined(__aarch64__)
#define SPECOPS_DECLARE_CPU(fn, Params)                                                            \
  SPECOPS_DECLARE_VARIANT(portable, fn, Params)                                                    \
  SPECOPS_DECLARE_VARIANT(neon, fn, Params)                                                        \
  SPECOPS_DECLARE_VARIANT(neon_bf16, fn, Params)                                                   \
  inline void fn(const Params& params) {                                                           \
    run_variant<Params>(                                                                           \
        #fn, {portable::fn, nullptr, nullptr, nullptr, nullptr, neon::fn, neon_bf16::fn}, params); \
  }                                                                                                \
  static_assert(true, "a semicolon follows")
#else
#define SPECOPS_DECLARE_CPU(fn, Params)                                                      \
  SPECOPS_DECLARE_VARIANT(portable, fn, Params)                                              \
  inline void fn(const Params& params) { run_variant<Params>(#fn, {portable::fn}, params); } \
  static_assert(true, "a semicolon follows")
#endif
#endif
