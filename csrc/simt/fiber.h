// SPDX-License-Identifier: Apache-2.0
// Stackful fibers. For known machines, the stack switch is written in assembly and takes a few
// nanoseconds; on others, ucontext is used and takes hundreds, because it makes a system call.
// Include this header in one file only, because it defines the switch.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)

// Saves the callee-saved registers on the current stack and the top of that stack in *from, then
// continues on the stack `to`. It ends with `ret` instead of a jump: fibers leave and resume at the
// same places, so the CPU predicts the return address correctly.
extern "C" void specops_simt_switch(void** from, void* to);
asm(R"(
.text
.hidden specops_simt_switch
.globl specops_simt_switch
.type specops_simt_switch, @function
specops_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size specops_simt_switch, .-specops_simt_switch
)");
#define SPECOPS_SIMT_SWITCH 1

#elif defined(__aarch64__)

extern "C" void specops_simt_switch(void** from, void* to);
#if defined(__APPLE__)
asm(R"(
.text
.private_extern _specops_simt_switch
.globl _specops_simt_switch
.p2align 2
_specops_simt_switch:
)"
#else
asm(R"(
.text
.hidden specops_simt_switch
.globl specops_simt_switch
.type specops_simt_switch, %function
specops_simt_switch:
)"
#endif
    R"(
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#define SPECOPS_SIMT_SWITCH 1

#else

#include <ucontext.h>

#endif

namespace specops::simt {

// A stack and its saved position. The entry function of a fiber never returns.
class Fiber {
 public:
  void start(unsigned char* stack, size_t stack_bytes, size_t color, void (*entry)()) {
    stack_ = stack;
    stack_bytes_ = stack_bytes;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(stack, stack_bytes);  // poisoned by an abandoned fiber
    fake_stack_ = nullptr;
#endif
    // The color shifts the tops of the stacks, so that they do not all use the same cache sets.
    unsigned char* top = stack + stack_bytes - 64 - color;
#if defined(__x86_64__)
    auto** frame = reinterpret_cast<void**>(top) - 8;  // six registers, the entry, alignment
    for (int i = 0; i < 8; ++i) frame[i] = nullptr;
    frame[6] = reinterpret_cast<void*>(entry);
    top_ = frame;
#elif defined(__aarch64__)
    auto** frame = reinterpret_cast<void**>(top - 160);
    for (int i = 0; i < 20; ++i) frame[i] = nullptr;
    frame[11] = reinterpret_cast<void*>(entry);  // x30
    top_ = frame;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = static_cast<size_t>(top - stack);
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }

  // Leaves this fiber, which must be the running one, and continues with `next`.
  void switch_to(Fiber& next) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fake_stack_, next.stack_, next.stack_bytes_);
#endif
#if defined(SPECOPS_SIMT_SWITCH)
    specops_simt_switch(&top_, next.top_);
#else
    swapcontext(&context_, &next.context_);
#endif
#if defined(__SANITIZE_ADDRESS__)
    arrived();
#endif
  }

  void prefetch() const {
#if defined(SPECOPS_SIMT_SWITCH)
    __builtin_prefetch(top_);
    __builtin_prefetch(static_cast<const char*>(top_) + 64);
#endif
  }

  // Tells AddressSanitizer that a new stack is in use; must be the first call on it. If `from` is
  // the host thread, its stack is recorded.
  void arrived([[maybe_unused]] Fiber* from = nullptr) {
#if defined(__SANITIZE_ADDRESS__)
    const void* bottom = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(fake_stack_, &bottom, &bytes);
    if (from != nullptr && from->stack_ == nullptr) {
      from->stack_ = static_cast<unsigned char*>(const_cast<void*>(bottom));
      from->stack_bytes_ = bytes;
    }
#endif
  }

 private:
#if defined(SPECOPS_SIMT_SWITCH)
  void* top_ = nullptr;
#else
  ucontext_t context_;
#endif
  unsigned char* stack_ = nullptr;
  size_t stack_bytes_ = 0;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack_ = nullptr;
#endif
};

}  // namespace specops::simt
