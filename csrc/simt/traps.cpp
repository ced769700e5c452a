// SPDX-License-Identifier: Apache-2.0
// Conversion of undefined behavior in kernels to launch errors. Kernel files are compiled with
// -fsanitize=alignment,null,bounds,shift,integer-divide-by-zero, and this file defines the handlers
// that these options call. An access to unmapped memory raises a signal, which becomes the same
// kind of error.
#include "simt/traps.h"

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "simt/machine.h"

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#include <ucontext.h>
#define SPECOPS_SIMT_SIGNALS 1
#endif

namespace specops::simt {
namespace {

struct SourceLocation {
  const char* file;
  uint32_t line;
  uint32_t column;
};

struct TypeDescriptor {
  uint16_t kind;
  uint16_t info;
  char name[1];
};

struct TypeMismatch {
  SourceLocation location;
  const TypeDescriptor* type;
  unsigned char log_alignment;
  unsigned char kind;
};

struct OutOfBounds {
  SourceLocation location;
  const TypeDescriptor* array_type;
  const TypeDescriptor* index_type;
};

[[noreturn]] void report(const std::string& what, const SourceLocation& location) {
  std::string path = location.file == nullptr ? "unknown" : location.file;
  std::string place = path.substr(path.rfind('/') + 1) + ":" + std::to_string(location.line);
  if (current_thread >= 0) fail_at(what, place);
  std::fprintf(
      stderr, "specops: host code of a kernel file: %s (%s)\n", what.c_str(), place.c_str());
  std::abort();
}

[[noreturn]] void report_mismatch(const TypeMismatch* data, uintptr_t pointer) {
  std::string type = data->type->name;
  if (pointer == 0) report("a null pointer to " + type, data->location);
  report("a pointer to " + type + " must be aligned to " +
             std::to_string(1u << data->log_alignment) + " bytes",
         data->location);
}

#if defined(SPECOPS_SIMT_SIGNALS)

constexpr size_t kStackBytes = 64 << 10;
alignas(64) unsigned char signal_stack[kStackBytes];
alignas(64) unsigned char error_stack[kStackBytes];
uintptr_t fault_address = 0;
struct sigaction before_segv, before_bus;
stack_t stack_before;

// Runs on error_stack after the signal handler has returned, because a signal handler must not
// switch fibers.
void fault_entry() {
  char address[32];
  std::snprintf(address, sizeof address, "0x%lx", static_cast<unsigned long>(fault_address));
  fail_at(describe_fault(fault_address) + " at address " + address +
              (fault_address < 4096 ? ", a null pointer" : ""),
          "after " + last_place());
}

void on_fault(int number, siginfo_t* info, void* context) {
  if (current_thread < 0) {
    sigaction(number, number == SIGSEGV ? &before_segv : &before_bus, nullptr);
    return;  // the access faults again and reaches the previous handler
  }
  fault_address = reinterpret_cast<uintptr_t>(info->si_addr);
  auto& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
  uintptr_t top = reinterpret_cast<uintptr_t>(error_stack) + kStackBytes - 64;
#if defined(__x86_64__)
  machine.gregs[REG_RIP] = reinterpret_cast<greg_t>(&fault_entry);
  machine.gregs[REG_RSP] = static_cast<greg_t>(top - 8);
#else
  machine.pc = reinterpret_cast<uintptr_t>(&fault_entry);
  machine.sp = top;
#endif
}

#endif

}  // namespace

#if defined(SPECOPS_SIMT_SIGNALS)

FaultGuard::FaultGuard() {
  stack_t stack{};
  stack.ss_sp = signal_stack;
  stack.ss_size = kStackBytes;
  sigaltstack(&stack, &stack_before);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &before_segv);
  sigaction(SIGBUS, &action, &before_bus);
}

FaultGuard::~FaultGuard() {
  sigaction(SIGSEGV, &before_segv, nullptr);
  sigaction(SIGBUS, &before_bus, nullptr);
  sigaltstack(&stack_before, nullptr);
}

#else

FaultGuard::FaultGuard() {}
FaultGuard::~FaultGuard() {}

#endif

}  // namespace specops::simt

extern "C" {

[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(const void* data, uintptr_t pointer) {
  specops::simt::report_mismatch(static_cast<const specops::simt::TypeMismatch*>(data), pointer);
}

[[noreturn]] void __ubsan_handle_out_of_bounds_abort(const void* data, uintptr_t index) {
  const auto* facts = static_cast<const specops::simt::OutOfBounds*>(data);
  specops::simt::report("index " + std::to_string(static_cast<int64_t>(index)) + " of an array " +
                            facts->array_type->name,
                        facts->location);
}

[[noreturn]] void __ubsan_handle_shift_out_of_bounds_abort(const void* data,
                                                           uintptr_t,
                                                           uintptr_t by) {
  specops::simt::report(
      "a shift by " + std::to_string(static_cast<int64_t>(by)) + ", more than the type has",
      *static_cast<const specops::simt::SourceLocation*>(data));
}

[[noreturn]] void __ubsan_handle_divrem_overflow_abort(const void* data, uintptr_t, uintptr_t) {
  specops::simt::report("a division by zero",
                        *static_cast<const specops::simt::SourceLocation*>(data));
}
}
