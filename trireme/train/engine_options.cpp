#include "trireme/train/engine_options.h"

#include "trireme/base/error.h"
#include "trireme/train/fp8.h"

namespace trireme::train {

at::ScalarType dtype_of(plan::Dtype dtype) {
  switch (dtype) {
    case plan::Dtype::kFp32:
      return at::kFloat;
    case plan::Dtype::kBf16:
      return at::kBFloat16;
    case plan::Dtype::kFp16:
      return at::kHalf;
  }
  throw LogicError("[train.engine_options] unknown dtype {}", static_cast<int>(dtype));
}

parallel::Options engine_options(const plan::Config& config, const comm::Mesh& mesh,
                                 const nn::Fp8History* history) {
  const plan::ParallelConfig& parallel = config.parallel;
  const at::ScalarType compute = dtype_of(config.precision.compute);
  return {.policy = plan::resolve_policy(parallel, mesh.shape.of_engine()),
          .compute = compute,
          .reduce = dtype_of(plan::wire_dtype(config.precision)),
          .accumulate = config.precision.accumulate,
          .device = mesh.world->device(),
          .overlap = parallel.overlap,
          .prefetch = parallel.prefetch,
          .reduction = config.comm.reduction,
          .reduce_when = parallel.reduce_when,
          .unused = parallel::Unused::kError,
          .average = parallel::Average::kSum,  // the step's scale is known before, with that of the loss
          .hook = {.hook = parallel.comm_hook,
                   .rank = parallel.hook_rank,
                   .density = parallel.hook_density,
                   .start_step = parallel.hook_start,
                   .local_steps = parallel.local_steps},
          .fp8_scales = scales_of(history)};
}

}  // namespace trireme::train
