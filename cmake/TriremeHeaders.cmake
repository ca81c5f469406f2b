# Which headers are installed: those that a program of a user includes, and what these include in turn. All others are
# internal: they may change with every version. `trireme_headers` checks that both stand alone.
set(trireme_public_headers
  base/env.h base/error.h base/log.h base/sink.h
  plan/batch.h plan/config.h plan/cost.h plan/flat_layout.h plan/memory.h plan/mesh_shape.h plan/model_facts.h
  plan/policy.h plan/presets.h plan/spread_head.h plan/vision_model.h plan/world.h
  gt/capture.h gt/dataset.h gt/nn.h gt/recompute.h gt/save.h gt/schedule.h gt/signal.h gt/tensor.h gt/workers.h controller/worker_ranks.h
  cli/train_main.h launch/local.h report/console.h report/pipeline_view.h report/run_dir.h
  kernels/device.h kernels/repeatable.h
  comm/group.h comm/world.h
  nn/attention.h nn/deferred_gradients.h nn/functional.h nn/gpt2.h nn/init.h nn/language_model.h nn/layers.h nn/llama.h nn/loss.h nn/mlp.h nn/vision_model.h
  data/corpus.h data/dataset.h data/images/codec.h data/images/loader.h data/loader.h data/mixture.h data/sampler.h data/tokenizer.h
  optim/learning_rate.h optim/optimizer.h
  checkpoint/safetensors.h memory/recompute.h precision/loss_scaler.h
  parallel/data_parallel.h parallel/pipeline.h parallel/sync_batch_norm.h parallel/tensor_layers.h parallel/unit_choice.h parallel/wrap.h
  state/state.h state/state_file.h
  tensor/redistribute.h
  text/load.h text/tokenizer.h
  train/connect.h train/generate.h train/image_model.h train/trainer.h)

# Adds what the headers of `list` include of ours, and so on.
function(trireme_add_included list)
  set(pending ${${list}})
  set(found)
  while(pending)
    list(POP_FRONT pending header)
    if(header IN_LIST found OR NOT EXISTS ${PROJECT_SOURCE_DIR}/trireme/${header})  # generated ones are no files here
      continue()
    endif()
    list(APPEND found ${header})
    file(STRINGS ${PROJECT_SOURCE_DIR}/trireme/${header} includes REGEX "^#include \"trireme/")
    list(TRANSFORM includes REPLACE "^#include \"trireme/([^\"]+)\".*" "\\1")
    list(APPEND pending ${includes})
  endwhile()
  set(${list} ${found} PARENT_SCOPE)
endfunction()
trireme_add_included(trireme_public_headers)

# trireme_headers(TARGET files...): each into the set that is installed, or into the one that is not.
function(trireme_headers target)
  foreach(path ${ARGN})
    file(RELATIVE_PATH header ${PROJECT_SOURCE_DIR}/trireme ${path})
    if(header IN_LIST trireme_public_headers)
      target_sources(${target} PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${path})
    else()
      target_sources(${target} PRIVATE FILE_SET internal TYPE HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR} FILES ${path})
    endif()
    set_property(GLOBAL APPEND PROPERTY trireme_headers_of_${target} ${header})
  endforeach()
endfunction()

# trireme_check_headers(TARGETS...): makes the target trireme_headers, which compiles each header on its own, with the
# flags of its target's sources. Those that include torch's large headers, or its tensor, themselves or through ours, take
# them from a precompiled header, which brings nothing that they do not bring: a second each instead of fifteen, or two.
function(trireme_check_headers)
  file(STRINGS ${PROJECT_SOURCE_DIR}/cmake/pch.h large REGEX "^#include <(ATen|torch)/")
  list(JOIN large "|" large)
  add_custom_target(trireme_headers)
  foreach(target ${ARGN})
    get_property(headers GLOBAL PROPERTY trireme_headers_of_${target})
    set(alone)
    set(with_tensor)
    set(with_torch)
    foreach(header ${headers})
      set(source ${PROJECT_BINARY_DIR}/headers/${header}.cpp)
      file(CONFIGURE OUTPUT ${source} CONTENT "#include \"trireme/${header}\"\n")
      set(closure ${header})
      trireme_add_included(closure)
      set(kind alone)
      foreach(included ${closure})
        file(STRINGS ${PROJECT_SOURCE_DIR}/trireme/${included} found REGEX "^(${large})" LIMIT_COUNT 1)
        if(found)
          set(kind with_torch)
          break()
        endif()
        file(STRINGS ${PROJECT_SOURCE_DIR}/trireme/${included} found REGEX "^#include <ATen/core/Tensor.h>" LIMIT_COUNT 1)
        if(found)
          set(kind with_tensor)
        endif()
      endforeach()
      list(APPEND ${kind} ${source})
    endforeach()
    foreach(kind alone with_tensor with_torch)
      if(${kind})
        set(objects ${target}_headers_${kind})
        add_library(${objects} OBJECT EXCLUDE_FROM_ALL ${${kind}})
        target_link_libraries(${objects} PRIVATE ${target} trireme_dev)
        if(kind STREQUAL "with_torch")
          target_precompile_headers(${objects} REUSE_FROM trireme)
        elseif(kind STREQUAL "with_tensor")
          target_precompile_headers(${objects} PRIVATE <ATen/core/Tensor.h>)
        endif()
        add_dependencies(trireme_headers ${objects})
      endif()
    endforeach()
  endforeach()
endfunction()
