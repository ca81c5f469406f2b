#pragma once
// What the data-parallel engine is told, beside the module and the mesh.
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "trireme/nn/fp8.h"
#include "trireme/optim/optimizer.h"
#include "trireme/parallel/compression.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/policy.h"
#include "trireme/plan/region.h"

namespace trireme::comm {
struct Mesh;
}

namespace trireme::parallel {

using plan::ReduceWhen;
using plan::Reduction;

/// What a parameter without a gradient at the end of a step means.
enum class Unused { kError, kZero };

/// What the gradient of a step is, of all that ranks and micro-batches contribute.
enum class Average {
  kMean,  ///< the mean by weight: micro-batches count as much as their weights say, 1 unless given
  kSum    ///< the sum, each multiplied by its weight as the loss's dtype rounds it
};

/// Delayed scaling of a linear layer of a block, as the module's own casts have it now.
using Fp8Scales = std::function<nn::Fp8Layer(int64_t block, plan::BlockLayer layer)>;

/// WrapOptions (wrap.h) as the engine reads them.
struct Options {
  plan::Policy policy = plan::find_policy(plan::PolicyName::kFsdp);
  /// Of parameters and gradients as the module sees them; Half on GPUs alone.
  at::ScalarType compute = at::kFloat;
  at::ScalarType reduce = at::kFloat;  ///< of gradients on the wire; Half with Reduction::kBackend alone
  plan::SumDtype accumulate = plan::SumDtype::kFp32;  ///< of the gradients of several micro-batches
  at::Device device = at::kCPU;
  bool overlap = true;   ///< communication on streams of its own, units unsharded ahead
  int64_t prefetch = 1;  ///< how many units are unsharded ahead of the one in use
  Reduction reduction = Reduction::kOrdered;
  ReduceWhen reduce_when = ReduceWhen::kOncePerStep;
  Unused unused = Unused::kError;
  Average average = Average::kMean;
  HookOptions hook = {};
  /// Delayed scales of units whose matrices are gathered in FP8 (plan::UnitSpec::fp8_block); none: scales are
  /// dynamic.
  Fp8Scales fp8_scales = {};
  /// The module is its user's: all writes to its parameters are watched for, and at its end the engine gives
  /// them back, which is collective where they are sharded.
  bool users_module = false;
};

/// The options; throws ConfigError that names a value out of its bounds, and options that do not go together.
const Options& checked(const Options& options);
/// The mesh; throws ConfigError where it has ranks along tp, and `units` name a parameter that is neither a
/// part for each of them nor a copy on all.
const comm::Mesh& checked(const comm::Mesh& mesh, const std::vector<plan::UnitSpec>& units);

/// To which group of an optimizer a parameter belongs.
using GroupRule = std::function<optim::Group(const std::string& name, at::IntArrayRef shape)>;

/// Writes the elements of a region of the whole parameter `name` to `out`: (region.numel()) fp32, contiguous,
/// on the device of the engine.
using Initializer = std::function<void(const std::string& name, const plan::Region& region, at::Tensor& out)>;

}  // namespace trireme::parallel
