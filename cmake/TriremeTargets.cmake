# The libraries and the compile rules they share. Folders add their own sources with trireme_sources().
add_library(trireme_dev INTERFACE)
target_compile_options(trireme_dev INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wnon-virtual-dtor -Woverloaded-virtual -Wimplicit-fallthrough>
  $<$<COMPILE_LANG_AND_ID:CXX,GNU>:
    # False alarms: g++ 12 in std::string concatenation (GCC bug 105651), g++ 13 in std::vector<bool> of torch's headers.
    -Wno-restrict -Wno-array-bounds
    # What is local to a function shadows, in a batch of sources, what is local to another source. To g++ the sources of
    # a batch are headers, where a class must not hold what is known to one source only.
    $<IF:$<BOOL:$<TARGET_PROPERTY:UNITY_BUILD>>,-Wno-subobject-linkage,-Wshadow>>
  $<$<AND:$<COMPILE_LANG_AND_ID:CXX,GNU>,$<VERSION_GREATER_EQUAL:$<CXX_COMPILER_VERSION>,13>>:-Wno-stringop-overflow>
  # std::stable_sort of g++'s library calls what C++17 deprecates, and only g++ is told so.
  $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-deprecated-declarations>
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${TRIREME_WERROR}>>:-Werror>)
if(TRIREME_SANITIZE)
  target_compile_options(trireme_dev INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${TRIREME_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer>
    # NaN that becomes an integer, which g++ does not look for: vectorised loops compute both sides of a choice.
    $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-fno-sanitize=float-cast-overflow>)
  target_link_options(trireme_dev INTERFACE -fsanitize=${TRIREME_SANITIZE})
endif()

# g++ instantiates what torch's headers use anew in every source that takes the precompiled header: 4 s of a source's 6.
# Reading CLI11 or googletest takes as long.
# Without optimisation, as under sanitizers, twice as many take no more memory.
function(trireme_in_batches target)
  set(batch 8)
  if(TRIREME_SANITIZE)
    set(batch 16)
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${TRIREME_UNITY} UNITY_BUILD_BATCH_SIZE ${batch})
endfunction()

set(sources_and_build ${PROJECT_SOURCE_DIR} ${PROJECT_BINARY_DIR}/generated)

add_library(trireme_plan STATIC)
add_library(Trireme::plan ALIAS trireme_plan)
target_include_directories(trireme_plan PUBLIC "$<BUILD_INTERFACE:${sources_and_build}>"
                           $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(trireme_plan PUBLIC cxx_std_20)
target_link_libraries(trireme_plan PUBLIC Trireme::fmt nlohmann_json::nlohmann_json Threads::Threads
                      PRIVATE yaml-cpp $<BUILD_INTERFACE:trireme_dev>)
set_target_properties(trireme_plan PROPERTIES EXPORT_NAME plan)
trireme_in_batches(trireme_plan)
if(TRIREME_SANITIZE)
  # Its tests go over thousands of layouts and schedules, which takes longer than to optimise a little.
  target_compile_options(trireme_plan PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O1>)
endif()

if(TRIREME_TORCH)
  add_library(trireme STATIC)
  add_library(Trireme::trireme ALIAS trireme)
  target_link_libraries(trireme PUBLIC trireme_plan Torch::cpu PRIVATE $<BUILD_INTERFACE:trireme_dev>)
  if(TRIREME_HAS_CUDA)
    target_link_libraries(trireme PUBLIC Torch::cuda)
  endif()
  target_precompile_headers(trireme PRIVATE ${PROJECT_SOURCE_DIR}/cmake/pch.h)
  trireme_in_batches(trireme)
endif()

include(TriremeHeaders)
# trireme_sources(TARGET files...): headers go to file sets, as TriremeHeaders.cmake says.
function(trireme_sources target)
  set(headers)
  set(sources)
  foreach(file ${ARGN})
    if(file MATCHES "\\.h$")
      list(APPEND headers ${CMAKE_CURRENT_SOURCE_DIR}/${file})
    else()
      list(APPEND sources ${CMAKE_CURRENT_SOURCE_DIR}/${file})
    endif()
    if(file MATCHES "\\.cu$")
      # Without torch's headers there is nothing to share, and architectures compile beside each other.
      set_source_files_properties(${file} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
  endforeach()
  target_sources(${target} PRIVATE ${sources})
  trireme_headers(${target} ${headers})
endfunction()
