# Sets trireme_cuda_archs, the architectures that our own kernels are compiled for: TRIREME_CUDA_ARCHS where it is given,
# else those of the GPUs that are here, else all that torch's wheel serves, with PTX of the newest for GPUs to come.
# No kernel of ours needs instructions of one architecture alone (90a, 100a), so the plain ones do.
set(trireme_all_cuda_archs 80-real 86-real 89-real 90-real 100-real 120)
set(trireme_cuda_archs ${TRIREME_CUDA_ARCHS})
if(NOT trireme_cuda_archs)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE capabilities RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT failed AND capabilities MATCHES "^[0-9.\n ]+$")
    string(REGEX REPLACE "[. ]" "" capabilities "${capabilities}")
    string(REPLACE "\n" ";" trireme_cuda_archs "${capabilities}")
    list(REMOVE_DUPLICATES trireme_cuda_archs)
  else()
    set(trireme_cuda_archs ${trireme_all_cuda_archs})
  endif()
endif()
