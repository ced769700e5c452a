# SPDX-License-Identifier: Apache-2.0
# libggml-specops.so, on request: SPECOPS_GGML is the folder of ggml's sources, whose headers it
# needs, and SPECOPS_GGML_LIB that of ggml's libraries.
if(NOT SPECOPS_GGML)
  return()
endif()

find_package(OpenMP REQUIRED COMPONENTS CXX)
file(READ ${SPECOPS_GGML}/CMakeLists.txt text)
set(version)
foreach(part MAJOR MINOR PATCH)
  string(REGEX MATCH "GGML_VERSION_${part} ([0-9]+)" _ "${text}")
  list(APPEND version ${CMAKE_MATCH_1})
endforeach()
list(JOIN version . version)

set(folder integrations/llamacpp)
set(headers ${SPECOPS_GGML}/include ${SPECOPS_GGML}/src)

add_library(ggml_specops MODULE EXCLUDE_FROM_ALL
  ${folder}/backend.cpp ${folder}/formats.cpp ${folder}/ops.cpp ${folder}/parallel_omp.cpp
  csrc/common/isa.cpp)
set_target_properties(ggml_specops PROPERTIES
  OUTPUT_NAME ggml-specops LIBRARY_OUTPUT_DIRECTORY ${PROJECT_SOURCE_DIR}/build/llamacpp
  BUILD_RPATH ${SPECOPS_GGML_LIB})
target_include_directories(ggml_specops PRIVATE csrc integrations)
target_include_directories(ggml_specops SYSTEM PRIVATE ${headers})
target_compile_options(ggml_specops PRIVATE -O2 ${SPECOPS_FLAGS} -Wno-missing-field-initializers)
target_compile_definitions(ggml_specops PRIVATE SPECOPS_GGML_VERSION="${version}")
find_library(SPECOPS_GGML_BASE ggml-base PATHS ${SPECOPS_GGML_LIB} NO_DEFAULT_PATH REQUIRED)
target_link_libraries(ggml_specops PRIVATE
  OpenMP::OpenMP_CXX ${SPECOPS_GGML_BASE} -Wl,-z,defs -Wl,--exclude-libs,ALL)

foreach(isa IN LISTS compiled)
  set(kernels ${SPECOPS_KERNELS_${isa}})
  list(FILTER kernels INCLUDE REGEX "^csrc/(gemm/|dense/linear)")
  if(SPECOPS_KERNELS_${isa} MATCHES "gemm_range_f32")
    list(APPEND kernels ${folder}/float_product_cpu.cpp)
  endif()
  add_library(ggml_specops_${isa} OBJECT EXCLUDE_FROM_ALL ${kernels})
  get_target_property(definitions specops_${isa} COMPILE_DEFINITIONS)
  get_target_property(options specops_${isa} COMPILE_OPTIONS)
  target_include_directories(ggml_specops_${isa} PRIVATE csrc integrations)
  target_include_directories(ggml_specops_${isa} SYSTEM PRIVATE ${headers})
  target_compile_definitions(ggml_specops_${isa} PRIVATE ${definitions})
  target_compile_options(ggml_specops_${isa} PRIVATE ${options})
  target_sources(ggml_specops PRIVATE $<TARGET_OBJECTS:ggml_specops_${isa}>)
endforeach()
