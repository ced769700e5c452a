// SPDX-License-Identifier: Apache-2.0
// Instruction sets of the CPU kernels; one of them is selected at run time. A kernel file is
// compiled once per instruction set, into a namespace with the name of the set (see
// CMakeLists.txt).
#pragma once

#if !defined(SPECOPS_ISA)
#include <stdexcept>
#include <string>
#endif

namespace specops {

enum class Isa : int { kPortable, kAvx2, kAvx512, kAvx512Bf16, kAmx, kNeon, kNeonBf16 };
constexpr int kNumIsas = 7;
constexpr Isa kAllIsas[kNumIsas] = {Isa::kPortable,
                                    Isa::kAvx2,
                                    Isa::kAvx512,
                                    Isa::kAvx512Bf16,
                                    Isa::kAmx,
                                    Isa::kNeon,
                                    Isa::kNeonBf16};

const char* isa_name(Isa isa);
bool isa_supported(Isa isa);  // compiled in, present in this CPU, and permitted by the system

// Returns whether kernels of `isa`, avx2, avx512 or neon, may use dot products of 8-bit integers
// (VNNI on x86; SDOT and UDOT on ARM), which are not part of these sets: this CPU has them for its
// vectors, and use_vnni() did not turn them off. Integer sums are exact, so kernels with and without
// them give the same bits.
bool has_vnni(Isa isa);
void use_vnni(bool use);  // for tests

// Returns the set that set_isa() chose, or else SPECOPS_ISA, or else the best supported one. Throws
// std::invalid_argument if SPECOPS_ISA is not a supported one.
Isa active_isa();
void set_isa(Isa isa);  // the caller checks isa_supported()

}  // namespace specops

// Declares a CPU launcher: its variants, and the function that calls the variant of the active
// instruction set.
#if defined(SPECOPS_ISA)
// A kernel file defines its own variant.
#define SPECOPS_DECLARE_CPU(fn, Params) \
  namespace SPECOPS_ISA {               \
  void fn(const Params& params);        \
  }                                     \
  static_assert(true, "a semicolon follows")
#else

namespace specops {

// Variants of a launcher, indexed by Isa; nullptr if a module does not have a variant.
template <typename Params>
using CpuVariants = void (*const[kNumIsas])(const Params& params);

// Returns the instruction set whose variant is used if `isa` has no variant; `isa` itself if there
// is no replacement.
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

// Runs the variant of the active instruction set. A build may omit sets (SPECOPS_ISAS);
// isa_supported() returns false for them. Instruction sets that extend another one have variants
// only of files that use their additional instructions.
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

// Weak symbols, so that object files do not depend on which variants exist, or on whether any
// exist: the interpreter's module (csrc/simt) has only CUDA kernels.
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
