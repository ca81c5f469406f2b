# Options, language standard and build type; included once by the root.
option(TRIREME_TORCH "Build everything that needs libtorch (off: base, plan, report, launch and the front command)" ON)
set(TRIREME_CUDA AUTO CACHE STRING "CUDA and NCCL support: AUTO (when a GPU and nvcc are here), ON or OFF")
set_property(CACHE TRIREME_CUDA PROPERTY STRINGS AUTO ON OFF)
set(TRIREME_CUDA_ARCHS "" CACHE STRING "CUDA architectures of our own kernels; empty: of the GPUs here, or all from sm_80 to sm_120")
set(TRIREME_CPU_ARCH native CACHE STRING "-march of the CPU kernels; x86-64-v3 for a binary that travels")
option(TRIREME_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(TRIREME_TEST_SHARDS "Let the tests of a program with libtorch share a few processes: .ci/run saves minutes" OFF)
option(TRIREME_INSTALL "Generate install rules" ${PROJECT_IS_TOP_LEVEL})
option(TRIREME_WERROR "Treat warnings as errors" OFF)
# A source's own includes are checked where it is compiled alone, so the preset for developers does that.
option(TRIREME_UNITY "Compile sources in batches: a build from nothing takes half as long" OFF)
set(TRIREME_SANITIZE "" CACHE STRING "Sanitizers for -fsanitize=, for example address,undefined")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# One flag for libraries and executables alike, so that they can share the precompiled header.
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fPIC>)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()

find_program(TRIREME_CCACHE ccache)
if(TRIREME_CCACHE AND PROJECT_IS_TOP_LEVEL)
  # pch_defines and time_macros let ccache cache sources that use a precompiled header.
  set(launcher ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime
      ${TRIREME_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${launcher})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${launcher})
endif()
# Not mold: that of Debian 12 (1.10) now and then never ends, or makes a program that does not start.
find_program(TRIREME_LLD ld.lld)
if(TRIREME_LLD AND PROJECT_IS_TOP_LEVEL)
  add_link_options(-fuse-ld=lld)
endif()
