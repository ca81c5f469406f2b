# Finds the folder 'torch' of an installed torch wheel without importing it. Sets TRIREME_TORCH_ROOT (empty: none).
# The wheel's own TorchConfig.cmake is not used: it demands nvcc on CPU-only machines and breaks CMake 3.25 with C++20.
set(TRIREME_TORCH_VERSION 2.11)
set(TRIREME_TORCH_DIR "$ENV{TRIREME_TORCH_DIR}" CACHE PATH "The folder 'torch' of a torch ${TRIREME_TORCH_VERSION} wheel")
set(TRIREME_TORCH_ROOT "")
if(TRIREME_TORCH_DIR)
  set(TRIREME_TORCH_ROOT ${TRIREME_TORCH_DIR})
elseif(TRIREME_TORCH OR NOT DEFINED TRIREME_TORCH)
  execute_process(
    COMMAND python3 -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE TRIREME_TORCH_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(TRIREME_TORCH_ROOT)
  if(NOT EXISTS ${TRIREME_TORCH_ROOT}/include/ATen/ATen.h)
    message(FATAL_ERROR "TRIREME_TORCH_DIR='${TRIREME_TORCH_ROOT}' holds no include/ATen/ATen.h. Fix: point it at the "
                        "folder 'torch' inside site-packages of a torch ${TRIREME_TORCH_VERSION} installation.")
  endif()
  file(STRINGS ${TRIREME_TORCH_ROOT}/version.py version_line REGEX "^__version__")
  string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" TRIREME_TORCH_FOUND_VERSION "${version_line}")
  if(NOT TRIREME_TORCH_FOUND_VERSION MATCHES "^2\\.11\\.")
    message(FATAL_ERROR "torch ${TRIREME_TORCH_FOUND_VERSION} in ${TRIREME_TORCH_ROOT} is not ${TRIREME_TORCH_VERSION}.x, "
                        "which Trireme is written for. Fix: pip install torch==2.11.0, or unset TRIREME_TORCH_DIR and "
                        "let ./trireme.sh install it.")
  endif()
endif()
