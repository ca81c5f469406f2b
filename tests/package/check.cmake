# cmake -DBUILD=<build folder> -DWORK=<scratch folder> -DTORCH_ROOT=<torch or empty> -P check.cmake
# Installs the build, moves the result elsewhere, and lets the project beside this file use it from there.
cmake_minimum_required(VERSION 3.25)
set(installed "${WORK}/installed")
set(moved "${WORK}/moved prefix")
file(REMOVE_RECURSE "${WORK}")

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# Not optimised, which takes two thirds of the time.
function(configure source build)
  run(${CMAKE_COMMAND} -S "${source}" -B "${build}" -G Ninja "-DCMAKE_PREFIX_PATH=${moved}" -DCMAKE_BUILD_TYPE=None
      -DCMAKE_FIND_USE_PACKAGE_REGISTRY=OFF ${ARGN})
endfunction()

function(build_consumer name)
  configure("${CMAKE_CURRENT_LIST_DIR}" "${WORK}/${name}" ${ARGN})
  run(${CMAKE_COMMAND} --build "${WORK}/${name}")
  run("${WORK}/${name}/plan_only")
endfunction()

run(${CMAKE_COMMAND} --install "${BUILD}" --prefix "${installed}")
file(RENAME "${installed}" "${moved}")
# Installed headers include nothing that is not installed, nor do programs of labs/, and internal ones are not there.
file(GLOB_RECURSE headers RELATIVE "${moved}/include" "${moved}/include/trireme/*.h")
file(GLOB_RECURSE programs "${CMAKE_CURRENT_LIST_DIR}/../../labs/*.cpp" "${CMAKE_CURRENT_LIST_DIR}/../../labs/*.h")
foreach(header ${headers} ${programs})
  cmake_path(ABSOLUTE_PATH header BASE_DIRECTORY "${moved}/include" OUTPUT_VARIABLE file)
  file(STRINGS "${file}" includes REGEX "^#include \"trireme/")
  foreach(line ${includes})
    string(REGEX REPLACE "^#include \"([^\"]+)\".*" "\\1" included "${line}")
    if(NOT EXISTS "${moved}/include/${included}")
      message(FATAL_ERROR "${header} includes ${included}, which is not installed: add it to TriremeHeaders.cmake")
    endif()
  endforeach()
endforeach()
foreach(internal kernels/cuda_kernels.h comm/rendezvous.h plan/config_internal.h train/parts.h gt/program.h)
  if("trireme/${internal}" IN_LIST headers)
    message(FATAL_ERROR "trireme/${internal} is internal, but it is installed")
  endif()
endforeach()
# A client of a controller links no torch, and starts the installed programs.
function(drive_workers)
  configure("${CMAKE_CURRENT_LIST_DIR}/../../examples/controller_mini_gpt" "${WORK}/controller_mini_gpt")
  run(${CMAKE_COMMAND} --build "${WORK}/controller_mini_gpt")
  set(small --width 32 --hidden 64 --heads 2 --vocabulary 53 --seq-len 8 --num-layers 4 --steps 3)
  run(${CMAKE_COMMAND} -E env "TRIREME_COMMAND=${moved}/bin/trireme" TRIREME_BACKEND=cpu
      "${WORK}/controller_mini_gpt/controller_mini_gpt" ${small} --checkpoint "${WORK}/mini_gpt.safetensors")
  run(${CMAKE_COMMAND} -E env "TRIREME_COMMAND=${moved}/bin/trireme" TRIREME_BACKEND=cpu
      "${WORK}/controller_mini_gpt/controller_mini_gpt" ${small} --steps 4 --checkpoint "${WORK}/mini_gpt.safetensors")
  run(${CMAKE_COMMAND} -E env "TRIREME_COMMAND=${moved}/bin/trireme" TRIREME_BACKEND=cpu "XDG_CACHE_HOME=${WORK}/cache"
      "${WORK}/controller_mini_gpt/controller_mini_gpt" ${small} --vocabulary 256
      --data "${CMAKE_CURRENT_LIST_DIR}/../../examples/controller_mini_gpt")
  run(${CMAKE_COMMAND} -E env "PATH=${moved}/bin:$ENV{PATH}" GT_BACKEND=numpy "${WORK}/controller_mini_gpt/signal_demo")
  run(${CMAKE_COMMAND} -E env "PATH=${moved}/bin:$ENV{PATH}" GT_BACKEND=numpy "${WORK}/controller_mini_gpt/compile_demo")
endfunction()

# A torch that cannot be found must not trouble a user of the planner.
build_consumer(plan -DCOMPONENTS=plan "-DTRIREME_TORCH_DIR=${WORK}/no torch here")
if(TORCH_ROOT)
  build_consumer(full "-DTRIREME_TORCH_DIR=${TORCH_ROOT}")
  run("${WORK}/full/full" "${WORK}/tensors.safetensors")
  drive_workers()
  foreach(example own_data own_module own_tensor_parallel pipeline your_module)
    configure("${CMAKE_CURRENT_LIST_DIR}/../../examples/${example}" "${WORK}/${example}" "-DTRIREME_TORCH_DIR=${TORCH_ROOT}")
    run(${CMAKE_COMMAND} --build "${WORK}/${example}")
  endforeach()
  # It starts the installed command, which starts it again as ranks; and it is a rank of that command's launcher.
  set(own_data "${WORK}/own_data/own_data" "${CMAKE_CURRENT_LIST_DIR}/../../examples/own_data/config.yaml"
      --device=cpu --train.steps=6 --train.val_every=3 --checkpoint.every=3 --run-dir "${WORK}/own_data/runs")
  run(${CMAKE_COMMAND} -E env "PATH=${moved}/bin:$ENV{PATH}" ${own_data} -n 2)
  run(${CMAKE_COMMAND} -E env "PATH=${moved}/bin:$ENV{PATH}" ${own_data} -n 1 --resume latest --train.steps=9)
  run("${moved}/bin/trireme" launch -n 2 ${own_data})
  foreach(ranks 1 2 3)
    set(launch "${moved}/bin/trireme" launch -n ${ranks})
    run(${launch} "${WORK}/own_module/own_module")
    run(${launch} "${WORK}/pipeline/pipeline")
    # A file of one mesh is read on another.
    run(${launch} "${WORK}/own_tensor_parallel/own_tensor_parallel" ${ranks} "${WORK}/tensor-parallel-${ranks}")
    run(${launch} "${WORK}/own_tensor_parallel/own_tensor_parallel" 1 "${WORK}/tensor-parallel-${ranks}")
    # More stages than blocks, of which some have nothing to train; and a schedule that there is not.
    run(${launch} "${WORK}/pipeline/pipeline" looped_bfs 9)
    execute_process(COMMAND ${launch} "${WORK}/pipeline/pipeline" 2f2b RESULT_VARIABLE code ERROR_VARIABLE said)
    if(code EQUAL 0 OR NOT said MATCHES "no schedule '2f2b'")
      message(FATAL_ERROR "pipeline 2f2b on ${ranks} ranks ended with ${code}: ${said}")
    endif()
    # What docs/your_module.md shows.
    file(MAKE_DIRECTORY "${WORK}/steps-${ranks}")
    run(${launch} "${WORK}/your_module/steps" "${WORK}/steps-${ranks}")
    # A run that is called again ends as one that was not interrupted.
    set(program "${WORK}/your_module/your_module")
    execute_process(COMMAND ${launch} "${program}" "${WORK}/whole-${ranks}" 30 OUTPUT_VARIABLE whole
                    COMMAND_ERROR_IS_FATAL ANY)
    run(${launch} "${program}" "${WORK}/parts-${ranks}" 20)
    execute_process(COMMAND ${launch} "${program}" "${WORK}/parts-${ranks}" 30 OUTPUT_VARIABLE parts
                    COMMAND_ERROR_IS_FATAL ANY)
    if(NOT whole MATCHES "step 30 accuracy 0[.][6-9]" OR NOT whole STREQUAL parts)
      message(FATAL_ERROR "your_module on ${ranks} ranks: without interruption '${whole}', with one '${parts}'")
    endif()
  endforeach()
endif()
