# SPDX-License-Identifier: Apache-2.0
# The interpreter's modules, for tests: the CUDA kernels on CPU tensors (_simt), and test kernels,
# some with deliberate bugs (_simt_test). Each is built plain, with the race detector (_race) and
# under AddressSanitizer (_asan), in its own folder. Built on request, never shipped. Only kernels
# and the machine are instrumented; the host code is the package's.
set(SPECOPS_SIMT_SOURCES
  csrc/simt/simt.cpp
  csrc/simt/mma.cpp
  csrc/simt/traps.cpp
  csrc/simt/detector.cpp
)
set(SPECOPS_SIMT_TEST_KERNELS tests/simt_kernels/kernels.cu)
set_source_files_properties(
  ${SPECOPS_CUDA_KERNELS} ${SPECOPS_SIMT_TEST_KERNELS} PROPERTIES LANGUAGE CXX)

# csrc/simt/traps.cpp defines the handlers of these checks, so that no sanitizer library is linked.
# The race detector needs the checks too: without them, structs are copied whole, including
# unwritten padding. The handlers do not return, which saves a third of the compile time.
set(checks
  -fsanitize=alignment,null,bounds,shift,integer-divide-by-zero -fno-sanitize-recover=all)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  set(SPECOPS_SIMT_QUIET -Wno-restrict)  # gcc 12 warns inside std::string
endif()
# Only the plain variant runs many tests: it alone is optimized for speed, and it has no line
# numbers, which only reports of the other two name. That saves a third of their compile time, and a
# fifth of its own.
if(NOT DEFINED SPECOPS_SIMT_FLAGS_plain)
  set(SPECOPS_SIMT_FLAGS_plain -O1 ${checks})
endif()
set(SPECOPS_SIMT_FLAGS_race
  -Og -g1 ${checks} -fsanitize=thread --param=tsan-instrument-func-entry-exit=0)
# The plain variant runs every case of this one. A call per access instead of an inline check, and
# no other checks, take a third of the compile time.
set(SPECOPS_SIMT_FLAGS_asan -Og -g1 -fsanitize=address -fsanitize-recover=address
  --param=asan-instrumentation-with-call-threshold=0)

# Configures one part of a module with the flags of the variant and extra options.
function(specops_simt_part name variant)
  target_include_directories(${name} PRIVATE csrc tests)
  target_compile_definitions(${name} PRIVATE SPECOPS_SIMT=1)
  if(variant STREQUAL race)
    target_compile_definitions(${name} PRIVATE SPECOPS_SIMT_RACE=1)
  endif()
  target_compile_options(${name} PRIVATE ${SPECOPS_FLAGS} -Wno-unknown-pragmas ${ARGN} -x c++)
endfunction()

# Bindings of the three variants.
function(specops_simt_binding name source)
  add_library(${name} OBJECT EXCLUDE_FROM_ALL ${source})
  specops_binding(${name})
  target_include_directories(${name} PRIVATE tests)
  target_compile_definitions(${name} PRIVATE SPECOPS_SIMT=1 ${ARGN})
endfunction()

specops_simt_binding(specops_simt_settings csrc/simt/ops.cpp)
specops_simt_binding(_simt_binding csrc/bindings.cpp SPECOPS_MODULE=_simt)
specops_simt_binding(
  _simt_test_binding tests/simt_kernels/module.cpp SPECOPS_MODULE=_simt_test)

foreach(variant plain race asan)
  set(machine specops_simt_machine_${variant})
  add_library(${machine} OBJECT EXCLUDE_FROM_ALL ${SPECOPS_SIMT_SOURCES})
  specops_simt_part(${machine} ${variant} -O3 ${SPECOPS_SIMT_QUIET})
  if(variant STREQUAL asan)
    target_compile_options(${machine} PRIVATE ${SPECOPS_SIMT_FLAGS_asan})
  endif()

  foreach(module _simt _simt_test)
    set(name ${module}_${variant})
    set(folder simt_${variant})
    if(variant STREQUAL plain)
      set(name ${module})
      set(folder simt)
    endif()
    set(host $<TARGET_OBJECTS:specops_host>)
    set(kernels ${SPECOPS_CUDA_KERNELS})
    if(module STREQUAL _simt_test)
      set(host)
      set(kernels ${SPECOPS_SIMT_TEST_KERNELS})
    endif()
    add_library(${name}_kernels OBJECT EXCLUDE_FROM_ALL ${kernels})
    specops_simt_part(${name}_kernels ${variant} ${SPECOPS_SIMT_FLAGS_${variant}})
    pybind11_add_module(${name} MODULE NO_EXTRAS EXCLUDE_FROM_ALL
      ${host} $<TARGET_OBJECTS:${module}_binding> $<TARGET_OBJECTS:specops_simt_settings>
      $<TARGET_OBJECTS:${machine}> $<TARGET_OBJECTS:${name}_kernels>)
    target_link_libraries(${name} PRIVATE Threads::Threads)
    if(variant STREQUAL asan)
      target_link_options(${name} PRIVATE -fsanitize=address)
    endif()
    set_target_properties(${name} PROPERTIES
      LINKER_LANGUAGE CXX
      OUTPUT_NAME ${module}
      LIBRARY_OUTPUT_DIRECTORY ${PROJECT_SOURCE_DIR}/build/${folder})
  endforeach()
endforeach()

# The sampling ops with scripted uniforms, for tests of the exact output distribution: the CPU
# kernels (_scripted) and the CUDA kernels in the interpreter (_scripted_simt). Headers in
# tests/scripted take precedence; files that draw no random numbers are shared with the other
# modules.
set(drawing "csrc/sampling/(sample|verify)")

# These tests run on the instruction set chosen here; no file involved has its own avx512_bf16
# variant.
list(GET native_isas 0 isa)
if(isa STREQUAL amx)
  set(isa avx512)
endif()
string(REPLACE _bf16 "" isa ${isa})
if(NOT isa IN_LIST compiled)
  set(isa portable)
endif()
set(kernels ${SPECOPS_CPU_KERNELS})
list(FILTER kernels INCLUDE REGEX ${drawing})
add_library(_scripted_kernels OBJECT EXCLUDE_FROM_ALL ${kernels})
target_include_directories(_scripted_kernels PRIVATE tests/scripted csrc)
target_compile_definitions(_scripted_kernels PRIVATE SPECOPS_ISA=${isa} SPECOPS_ISA_${isa}=1)
target_compile_options(_scripted_kernels PRIVATE -O2 ${SPECOPS_FLAGS} ${SPECOPS_FLAGS_${isa}})
set(others_of_scripted $<FILTER:$<TARGET_OBJECTS:specops_${isa}>,EXCLUDE,${drawing}>)
if(TARGET specops_${isa}_vnni)
  list(APPEND others_of_scripted $<TARGET_OBJECTS:specops_${isa}_vnni>)
endif()

set(kernels ${SPECOPS_CUDA_KERNELS})
list(FILTER kernels INCLUDE REGEX ${drawing})
add_library(_scripted_simt_kernels OBJECT EXCLUDE_FROM_ALL ${kernels})
target_include_directories(_scripted_simt_kernels PRIVATE tests/scripted)
specops_simt_part(_scripted_simt_kernels plain ${SPECOPS_SIMT_FLAGS_plain})
set(others_of_scripted_simt $<FILTER:$<TARGET_OBJECTS:_simt_kernels>,EXCLUDE,${drawing}>
  $<TARGET_OBJECTS:specops_simt_machine_plain> $<TARGET_OBJECTS:specops_simt_settings>)

foreach(name scripted scripted_simt)
  pybind11_add_module(_${name} MODULE NO_EXTRAS EXCLUDE_FROM_ALL tests/scripted/module.cpp
    $<TARGET_OBJECTS:specops_host> $<TARGET_OBJECTS:_${name}_kernels> ${others_of_${name}})
  target_include_directories(_${name} PRIVATE tests/scripted)
  specops_binding(_${name})
  target_compile_definitions(_${name} PRIVATE SPECOPS_MODULE=_${name})
  set_target_properties(
    _${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${PROJECT_SOURCE_DIR}/build/scripted)
endforeach()
target_compile_definitions(_scripted_simt PRIVATE SPECOPS_SIMT=1)
