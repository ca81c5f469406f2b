# Libraries for tokenizers, each of which the build can do without: regular expressions and Unicode normalisation. Static,
# for binaries that travel to machines without.

# trireme_find_text(NAME header library package): sets TRIREME_HAS_NAME and TRIREME_NAME_LINK.
function(trireme_find_text name header library package)
  find_path(TRIREME_${name}_INCLUDE ${header})
  find_library(TRIREME_STATIC_${library} lib${library}.a)
  find_library(TRIREME_SHARED_${library} ${library})
  mark_as_advanced(TRIREME_${name}_INCLUDE TRIREME_STATIC_${library} TRIREME_SHARED_${library})
  set(link ${TRIREME_STATIC_${library}})
  if(NOT link)
    set(link ${TRIREME_SHARED_${library}})
  endif()
  set(has FALSE)
  if(TRIREME_${name}_INCLUDE AND link)
    set(has TRUE)
  else()
    message(STATUS "text: no ${name}; apt install ${package} for tokenizers that need it")
  endif()
  set(TRIREME_HAS_${name} ${has} PARENT_SCOPE)
  set(TRIREME_${name}_LINK ${link} PARENT_SCOPE)
endfunction()

trireme_find_text(PCRE2 pcre2.h pcre2-8 libpcre2-dev)
trireme_find_text(UTF8PROC utf8proc.h utf8proc libutf8proc-dev)
