// SPDX-License-Identifier: Apache-2.0
#include "common/isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace specops {
namespace {

// Returns the default instruction set. It depends only on CPU features and never on timings,
// because results depend on the instruction set. Intel CPUs run dot products of bfloat16 pairs at
// half the rate of fused multiply-adds. On Intel CPUs without AMX, the kernels without these dot
// products are as fast for a few rows and faster for more, so they are the default there.
Isa best_isa() {
  bool is_intel = false;
#if defined(__x86_64__)
  __builtin_cpu_init();
  is_intel = __builtin_cpu_is("intel");
#endif
  for (Isa isa :
       {Isa::kAmx, Isa::kAvx512Bf16, Isa::kAvx512, Isa::kAvx2, Isa::kNeonBf16, Isa::kNeon}) {
    if (isa == Isa::kAvx512Bf16 && is_intel && isa_supported(Isa::kAvx512)) continue;
    if (isa_supported(isa)) return isa;
  }
  return Isa::kPortable;
}

#if defined(__aarch64__)
// Products that some 64-bit ARM CPUs have. If the operating system cannot report them, they count as
// missing.
struct ArmProducts {
  bool dot;    // 8-bit integers, both signed or both unsigned
  bool mixed;  // 8-bit integers, signed times unsigned
  bool bf16;
};

[[maybe_unused]] ArmProducts arm_products() {
#if defined(__linux__)
  // HWCAP_ASIMDDP, HWCAP2_I8MM and HWCAP2_BF16, which older headers lack.
  constexpr unsigned long kDot = 1ul << 20, kMixed = 1ul << 13, kBf16 = 1ul << 14;
  unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
  return {(first & kDot) != 0, (second & kMixed) != 0, (second & kBf16) != 0};
#elif defined(__APPLE__)
  auto has = [](const char* name) {
    int value = 0;
    size_t size = sizeof(value);
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
  };
  return {has("hw.optional.arm.FEAT_DotProd"),
          has("hw.optional.arm.FEAT_I8MM"),
          has("hw.optional.arm.FEAT_BF16")};
#else
  return {};
#endif
}
#endif

#if defined(SPECOPS_HAS_amx)
// Returns whether the CPU has AMX tiles with products of bf16 and int8, and Linux permits their
// use. The function requests the permission, which covers all threads of the process and is
// permanent. Without it, the first tile instruction kills the process.
bool has_amx() {
#if defined(__x86_64__) && defined(__linux__)
  constexpr unsigned kAmx = 1u << 22 | 1u << 24 | 1u << 25;   // leaf 7, edx: bf16, tiles, int8
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kAmx) != kAmx) return false;
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}
#endif

Isa default_isa() {
  const char* text = std::getenv("SPECOPS_ISA");
  if (text == nullptr || *text == '\0') return best_isa();
  std::string names;
  for (Isa isa : kAllIsas) {
    if (!isa_supported(isa)) continue;
    if (std::strcmp(text, isa_name(isa)) == 0) return isa;
    names += std::string(names.empty() ? "" : ", ") + isa_name(isa);
  }
  throw std::invalid_argument("SPECOPS_ISA must be one of " + names + ", got '" + text + "'");
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa{default_isa()};
  return isa;
}

[[maybe_unused]] std::atomic<bool> vnni_allowed{true};

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAmx:
      return "amx";
    case Isa::kAvx512Bf16:
      return "avx512_bf16";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kNeonBf16:
      return "neon_bf16";
    case Isa::kNeon:
      return "neon";
    default:
      return "portable";
  }
}

bool isa_supported(Isa isa) {
  // SPECOPS_HAS_* marks the variants that CMakeLists.txt builds.
#if defined(__x86_64__)
  __builtin_cpu_init();
  [[maybe_unused]] bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                               __builtin_cpu_supports("f16c");
  [[maybe_unused]] bool avx512 =
      avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  switch (isa) {
#ifdef SPECOPS_HAS_amx
    case Isa::kAmx:
      return isa_supported(Isa::kAvx512Bf16) && has_amx();
#endif
#ifdef SPECOPS_HAS_avx512_bf16
    case Isa::kAvx512Bf16:
      return avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
#endif
#ifdef SPECOPS_HAS_avx512
    case Isa::kAvx512:
      return avx512;
#endif
#ifdef SPECOPS_HAS_avx2
    case Isa::kAvx2:
      return avx2;
#endif
#ifdef SPECOPS_HAS_neon_bf16
    case Isa::kNeonBf16: {
      ArmProducts products = arm_products();
      return products.dot && products.mixed && products.bf16;
    }
#endif
#ifdef SPECOPS_HAS_neon
    case Isa::kNeon:
      return true;
#endif
#ifdef SPECOPS_HAS_portable
    case Isa::kPortable:
      return true;
#endif
    default:
      return false;
  }
}

bool has_vnni([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  static const bool wide = __builtin_cpu_supports("avx512vnni");
  static const bool narrow = [] {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr unsigned kAvxVnni = 1u << 4;  // leaf 7.1, eax; gcc 12 has no name for it
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & kAvxVnni) != 0;
  }();
  return (isa == Isa::kAvx2 ? narrow : wide) && vnni_allowed.load(std::memory_order_relaxed);
#elif defined(__aarch64__)
  static const bool dot = arm_products().dot;
  return dot && vnni_allowed.load(std::memory_order_relaxed);
#else
  return false;
#endif
}

void use_vnni(bool use) { vnni_allowed.store(use, std::memory_order_relaxed); }

Isa active_isa() { return current().load(std::memory_order_relaxed); }

void set_isa(Isa isa) { current().store(isa, std::memory_order_relaxed); }

}  // namespace specops
