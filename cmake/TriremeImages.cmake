# Libraries for images, each of which the build can do without: gzip files, JPEG, PNG, and fonts to draw digits from.
# Static where the system has them so, for binaries that travel to machines without.

# trireme_find_images(NAME header package [SUFFIX folder] LIBRARIES names...): sets TRIREME_NAME_INCLUDE, TRIREME_NAME_LINK
# (the libraries, in link order) and TRIREME_HAS_NAME.
function(trireme_find_images name header package)
  cmake_parse_arguments(arg "" "SUFFIX" "LIBRARIES" ${ARGN})
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
    message(STATUS "images: no ${name}; apt install ${package} for what needs it")
  endif()
  set(TRIREME_HAS_${name} ${has} PARENT_SCOPE)
  set(TRIREME_${name}_LINK ${static} PARENT_SCOPE)
endfunction()

trireme_find_images(ZLIB zlib.h zlib1g-dev LIBRARIES z)
trireme_find_images(JPEG jpeglib.h libjpeg-dev LIBRARIES jpeg)
trireme_find_images(PNG png.h libpng-dev LIBRARIES png z)
trireme_find_images(FREETYPE ft2build.h libfreetype-dev SUFFIX freetype2
                    LIBRARIES freetype bz2 png z brotlidec brotlicommon)
