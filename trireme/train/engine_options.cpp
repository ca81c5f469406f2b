#include "trireme/train/engine_options.h"

#include <map>

namespace trireme::train {
namespace {

parallel::Hook hook_of(const std::string& name) {
  using parallel::Hook;
  static const std::map<std::string, Hook> hooks = {
      {"none", Hook::kNone}, {"fp16", Hook::kFp16},         {"int8", Hook::kInt8},
      {"topk", Hook::kTopK}, {"powersgd", Hook::kPowerSgd}, {"local_sgd", Hook::kLocalSgd}};
  return hooks.at(name);
}

}  // namespace

at::ScalarType dtype_of(const std::string& name) {
  if (name == "fp16") return at::kHalf;
  return name == "bf16" ? at::kBFloat16 : at::kFloat;
}

parallel::Options engine_options(const plan::Config& config, const comm::Mesh& mesh) {
  const plan::ParallelConfig& parallel = config.parallel;
  const at::ScalarType compute = dtype_of(config.precision.compute);
  return {.policy = plan::resolve_policy(parallel, mesh.shape),
          .compute = compute,
          .reduce = dtype_of(plan::wire_dtype(config.precision)),
          .device = mesh.world->device(),
          .overlap = parallel.overlap,
          .prefetch = parallel.prefetch,
          .reduction = config.comm.reduction == "ordered" ? parallel::Reduction::kOrdered
                                                          : parallel::Reduction::kBackend,
          .reduce_when = parallel.reduce_when == "once" ? parallel::ReduceWhen::kOncePerStep
                                                        : parallel::ReduceWhen::kEveryMicroBatch,
          .unused = parallel::Unused::kError,
          .hook = {.hook = hook_of(parallel.comm_hook),
                   .rank = parallel.hook_rank,
                   .density = parallel.hook_density,
                   .start_step = parallel.hook_start,
                   .local_steps = parallel.local_steps}};
}

}  // namespace trireme::train
