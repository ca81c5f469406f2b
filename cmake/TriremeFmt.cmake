# Trireme::fmt: it ships inside torch as headers only, whose compiled half trireme/base/fmt_library.cpp provides; the
# system's copy, header-only, serves a build without torch.
# Torch's own include folder is fenced off by a link to the one folder in it, so that plan, report and launch cannot
# include ATen by accident.
include(TriremeFindTorch)
add_library(trireme_fmt INTERFACE)
add_library(Trireme::fmt ALIAS trireme_fmt)
if(TRIREME_TORCH_ROOT)
  set(fmt_fence ${CMAKE_BINARY_DIR}/fence)
  file(MAKE_DIRECTORY ${fmt_fence})
  file(CREATE_LINK ${TRIREME_TORCH_ROOT}/include/fmt ${fmt_fence}/fmt SYMBOLIC)
  target_include_directories(trireme_fmt SYSTEM INTERFACE $<BUILD_INTERFACE:${fmt_fence}>)
else()
  find_path(TRIREME_FMT_INCLUDE fmt/format.h)
  if(NOT TRIREME_FMT_INCLUDE)
    message(FATAL_ERROR "fmt was found neither inside torch nor in the system. Fix: apt install libfmt-dev, or set "
                        "TRIREME_TORCH_DIR to the folder 'torch' of a torch 2.11 installation.")
  endif()
  target_compile_definitions(trireme_fmt INTERFACE FMT_HEADER_ONLY=1)
  # The compiler already searches /usr/include; naming it again breaks <cstdlib>'s include_next.
endif()
