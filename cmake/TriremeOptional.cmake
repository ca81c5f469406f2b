# Libraries that the build can do without. Static where the system has them so, for binaries that travel to machines
# without.
include_guard(GLOBAL)

# trireme_find_optional(NAME header package USE words [SUFFIX folder] LIBRARIES names...): sets TRIREME_NAME_INCLUDE, TRIREME_NAME_LINK
# (the libraries, in link order) and TRIREME_HAS_NAME.
function(trireme_find_optional name header package)
  cmake_parse_arguments(arg "" "USE;SUFFIX" "LIBRARIES" ${ARGN})
  find_path(TRIREME_${name}_INCLUDE ${header} PATH_SUFFIXES ${arg_SUFFIX})
  mark_as_advanced(TRIREME_${name}_INCLUDE)
  set(static)
  foreach(library ${arg_LIBRARIES})
    find_library(TRIREME_STATIC_${library} lib${library}.a)
    mark_as_advanced(TRIREME_STATIC_${library})
    list(APPEND static ${TRIREME_STATIC_${library}})
  endforeach()
  list(GET arg_LIBRARIES 0 first)
  find_library(TRIREME_SHARED_${first} ${first})
  mark_as_advanced(TRIREME_SHARED_${first})
  if(static MATCHES "NOTFOUND")
    set(static ${TRIREME_SHARED_${first}})
  endif()
  set(has FALSE)
  if(TRIREME_${name}_INCLUDE AND static AND NOT static MATCHES "NOTFOUND")
    set(has TRUE)
  else()
    message(STATUS "no ${name}; apt install ${package} for ${arg_USE}")
  endif()
  set(TRIREME_HAS_${name} ${has} CACHE INTERNAL "")
  set(TRIREME_${name}_LINK ${static} CACHE INTERNAL "")
endfunction()

# trireme_optional_source(TARGET LIBRARY source stand-in): the source that uses the library, or what stands in for it.
function(trireme_optional_source target library source stand_in)
  if(NOT TRIREME_HAS_${library})
    trireme_sources(${target} ${stand_in})
    return()
  endif()
  trireme_sources(${target} ${source})
  # The compiler already searches /usr/include; naming it again breaks <cstdlib>'s include_next.
  if(NOT TRIREME_${library}_INCLUDE STREQUAL /usr/include)
    set_source_files_properties(${source} TARGET_DIRECTORY ${target}
                                PROPERTIES COMPILE_OPTIONS "-isystem;${TRIREME_${library}_INCLUDE}")
  endif()
  target_link_libraries(${target} PRIVATE ${TRIREME_${library}_LINK})
endfunction()
