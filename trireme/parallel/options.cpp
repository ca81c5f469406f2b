#include "trireme/parallel/options.h"

#include <string>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/comm/mesh.h"
#include "trireme/plan/saved_copy.h"

namespace trireme::parallel {
namespace {

template <typename Value>
void require(bool holds, const char* key, const Value& value, std::string_view wanted) {
  if (!holds) throw ConfigError("[parallel.options] {} is {}; set it to {}", key, value, wanted);
}

/// `no_half`: what does not take Half here; empty: it is taken.
void check_dtype(const char* key, at::ScalarType dtype, const std::string& no_half) {
  const bool takes_half = no_half.empty();
  require(dtype == at::kFloat || dtype == at::kBFloat16 || (takes_half && dtype == at::kHalf), key,
          c10::toString(dtype), takes_half ? "Float, BFloat16 or Half" : "Float or BFloat16, as " + no_half);
}

void check_hook(const HookOptions& hook) {
  require(hook.rank >= 1, "hook.rank", hook.rank, "1 or more columns");
  require(hook.density > 0.0 && hook.density <= 1.0, "hook.density", hook.density,
          "a fraction above 0 and at most 1");
  require(hook.start_step >= 0, "hook.start_step", hook.start_step, "0 or more steps");
  require(hook.local_steps >= 1, "hook.local_steps", hook.local_steps, "1 or more steps");
}

}  // namespace

const Options& checked(const Options& options) {
  check_hook(options.hook);
  check_dtype("compute", options.compute, options.device.is_cpu() ? "updates on a CPU need" : "");
  check_dtype("reduce", options.reduce,
              options.reduction == Reduction::kOrdered ? "sums in a fixed order need" : "");
  require(options.prefetch >= 0, "prefetch", options.prefetch, "0 or more units");
  require(options.reduce_when == ReduceWhen::kOncePerStep || options.average == Average::kSum ||
              !plan::keeps_residual(options.hook.hook),
          "reduce_when", options.reduce_when,
          "kOncePerStep, because the gradient is a mean and the hook carries over what it could not send, "
          "which needs the weight of the whole step");
  const std::string_view obstacle = plan::hook_obstacle(options.policy, options.hook.hook);
  if (obstacle.empty()) return options;
  throw ConfigError("[parallel.options] {} cannot be combined with {}: {}",
                    options.hook.hook == Hook::kLocalSgd ? "local SGD" : "a communication hook",
                    options.policy.label(), obstacle);
}

const comm::Mesh& checked(const comm::Mesh& mesh, const std::vector<plan::UnitSpec>& units) {
  const int64_t ranks = mesh.shape.size(plan::Axis::kTp);
  if (ranks == 1) return mesh;
  for (const plan::UnitSpec& unit : units) {
    for (const plan::ParamSpec& param : unit.params) {
      if (!param.part.is_whole() || param.part.copies == ranks) continue;
      throw ConfigError(
          "[parallel.options] the mesh ({}) has {} ranks along tp, but parameter {} is not split along it, "
          "so "
          "these ranks would train copies of one part; make the mesh with tp of 1, or cut the layers of a "
          "module of yours with ColumnLinear and RowLinear (parallel/tensor_layers.h)",
          mesh.shape.to_string(), ranks, param.name);
    }
  }
  return mesh;
}

}  // namespace trireme::parallel
