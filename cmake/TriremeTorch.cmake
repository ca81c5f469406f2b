# Torch::cpu (ATen, autograd, c10d with Gloo) and, with CUDA, Torch::cuda (plus NCCL) as plain imported targets.
include_guard(GLOBAL)
include(TriremeFindTorch)
if(NOT TRIREME_TORCH_ROOT)
  message(FATAL_ERROR "torch ${TRIREME_TORCH_VERSION} was not found. Fix: ./trireme.sh installs it; or pip install "
                      "torch==2.11.0; or set TRIREME_TORCH_DIR.")
endif()
get_filename_component(site_packages ${TRIREME_TORCH_ROOT} DIRECTORY)

find_library(TRIREME_CUDART NAMES libcudart.so.13 libcudart.so
             PATHS ${site_packages}/nvidia/cu13/lib /usr/local/cuda/lib64 NO_DEFAULT_PATH REQUIRED)
get_filename_component(cudart_dir ${TRIREME_CUDART} DIRECTORY)
set(TRIREME_RPATH ${TRIREME_TORCH_ROOT}/lib ${cudart_dir})

add_library(Torch::cpu INTERFACE IMPORTED GLOBAL)
target_include_directories(Torch::cpu SYSTEM INTERFACE
  ${TRIREME_TORCH_ROOT}/include ${TRIREME_TORCH_ROOT}/include/torch/csrc/api/include)
target_compile_definitions(Torch::cpu INTERFACE USE_DISTRIBUTED USE_C10D_GLOO)
# From 18 on clang spells the names of constrained templates otherwise than the g++ that compiled torch.
target_compile_options(Torch::cpu INTERFACE
  $<$<AND:$<COMPILE_LANG_AND_ID:CXX,Clang>,$<VERSION_GREATER_EQUAL:$<CXX_COMPILER_VERSION>,18>>:-fclang-abi-compat=17>)
target_link_directories(Torch::cpu INTERFACE ${TRIREME_TORCH_ROOT}/lib)
# Operators register themselves when a library is loaded, so libraries that no symbol refers to must stay linked.
# One item each: CMake drops a flag that it has seen before.
target_link_libraries(Torch::cpu INTERFACE
  "-Wl,--push-state,--no-as-needed,-ltorch_cpu,-lc10,-l:libgomp.so.1,${TRIREME_CUDART},--pop-state" Threads::Threads)

set(TRIREME_HAS_CUDA OFF)
if(NOT TRIREME_CUDA STREQUAL OFF)
  find_program(TRIREME_NVCC nvcc PATHS ${site_packages}/nvidia/cu13/bin /usr/local/cuda/bin)
  find_library(TRIREME_NCCL NAMES libnccl.so.2 PATHS ${site_packages}/nvidia/nccl/lib NO_DEFAULT_PATH)
  file(GLOB gpus /dev/nvidia[0-9]*)
  if(TRIREME_CUDA STREQUAL ON OR (TRIREME_NVCC AND TRIREME_NCCL AND gpus))
    if(NOT TRIREME_NVCC OR NOT TRIREME_NCCL)
      message(FATAL_ERROR "TRIREME_CUDA=ON needs nvcc (found: ${TRIREME_NVCC}) and the NCCL of torch's wheel (found: "
                          "${TRIREME_NCCL}). Fix: pip install torch==2.11.0 with its dependencies, and nvcc 13.")
    endif()
    set(TRIREME_HAS_CUDA ON)
  endif()
endif()

if(TRIREME_HAS_CUDA)
  set(CMAKE_CUDA_COMPILER ${TRIREME_NVCC})
  include(TriremeCudaArchs)
  set(CMAKE_CUDA_ARCHITECTURES ${trireme_cuda_archs})
  set(CMAKE_CUDA_STANDARD 20)
  enable_language(CUDA)
  if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc has C++20
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  find_library(TRIREME_CUBLASLT NAMES libcublasLt.so.13 libcublasLt.so
               PATHS ${site_packages}/nvidia/cu13/lib /usr/local/cuda/lib64 NO_DEFAULT_PATH REQUIRED)
  # libtorch_cuda's own cuDNN, which it brings along.
  find_path(TRIREME_CUDNN_INCLUDE cudnn.h PATHS ${site_packages}/nvidia/cudnn/include NO_DEFAULT_PATH REQUIRED)
  find_library(TRIREME_CUDNN NAMES libcudnn.so.9 PATHS ${site_packages}/nvidia/cudnn/lib NO_DEFAULT_PATH REQUIRED)
  get_filename_component(cudnn_dir ${TRIREME_CUDNN} DIRECTORY)
  list(APPEND TRIREME_RPATH ${cudnn_dir})
  get_filename_component(nccl_dir ${TRIREME_NCCL} DIRECTORY)
  list(APPEND TRIREME_RPATH ${nccl_dir})
  get_filename_component(cuda_home ${TRIREME_NVCC} DIRECTORY)
  get_filename_component(cuda_home ${cuda_home} DIRECTORY)
  add_library(Torch::cuda INTERFACE IMPORTED GLOBAL)
  # ProcessGroupNCCL::Options embeds ncclConfig_t by value: its header must be the wheel's, before any other.
  target_include_directories(Torch::cuda SYSTEM BEFORE INTERFACE ${site_packages}/nvidia/nccl/include)
  target_include_directories(Torch::cuda SYSTEM INTERFACE ${cuda_home}/include ${cuda_home}/include/cccl)
  target_compile_definitions(Torch::cuda INTERFACE USE_C10D_NCCL)
  target_link_libraries(Torch::cuda INTERFACE Torch::cpu
    "-Wl,--push-state,--no-as-needed,-ltorch_cuda,-lc10_cuda,${TRIREME_NCCL},--pop-state" ${TRIREME_CUBLASLT} ${TRIREME_CUDNN})
endif()
message(STATUS "torch ${TRIREME_TORCH_FOUND_VERSION} in ${TRIREME_TORCH_ROOT}; CUDA ${TRIREME_HAS_CUDA} ${trireme_cuda_archs}")
