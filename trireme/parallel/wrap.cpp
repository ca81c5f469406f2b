#include "trireme/parallel/wrap.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/nn/lent_gradient.h"
#include "trireme/plan/buckets.h"

namespace trireme::parallel {
namespace {

using torch::nn::Module;

std::vector<plan::ParamSpec> param_specs(const Module& module) {
  std::vector<plan::ParamSpec> specs;
  for (const auto& entry : module.named_parameters())
    specs.push_back({entry.key(), entry.value().sizes().vec()});
  return specs;
}

void check_parameters(const Module& module, const char* operation) {
  const auto params = module.named_parameters();
  TRIREME_CHECK(!params.is_empty(), "[parallel.{}] {} has no parameters", operation, module.name());
  for (const auto& entry : params) {
    const at::Tensor& param = entry.value();
    if (nn::has_lender(param) || param.storage_offset() != 0 || param.storage().nbytes() > param.nbytes()) {
      throw LogicError(
          "[parallel.{}] parameter {} of {} is a view into a larger buffer, or an engine's; a module is "
          "wrapped once, and its parameters are whole (has it been wrapped already?)",
          operation, entry.key(), module.name());
    }
    if (!param.is_floating_point() || param.device() != params.front().value().device()) {
      throw LogicError(
          "[parallel.{}] parameter {} is {} on {}, but {} is {} on {}; make them floating point, on one "
          "device",
          operation, entry.key(), c10::toString(param.scalar_type()), param.device().str(),
          params.front().key(), c10::toString(params.front().value().scalar_type()),
          params.front().value().device().str());
    }
  }
}

void broadcast_from_root(at::Tensor tensor, const comm::Mesh& mesh) {
  const at::NoGradGuard no_grad;
  at::Tensor on_device = tensor.detach().to(mesh.world->device()).contiguous();
  mesh.dp->broadcast(on_device, 0);
  if (!on_device.is_alias_of(tensor)) tensor.detach().copy_(on_device);
}

/// A parameter's elements as rank 0 had them.
Initializer values_of(const Module& module, const comm::Mesh& mesh) {
  std::map<std::string, at::Tensor> values;
  for (const auto& entry : module.named_parameters()) {
    broadcast_from_root(entry.value(), mesh);
    values.emplace(entry.key(), entry.value().detach());
  }
  return [values](const std::string& name, int64_t first, at::Tensor& out) {
    out.copy_(values.at(name).reshape({-1}).narrow(0, first, out.numel()));
  };
}

Options engine_options(const WrapOptions& options, const std::string& policy, const comm::Mesh& mesh) {
  return {.policy = plan::find_policy(policy),
          .compute = options.compute,
          .reduce = options.reduce,
          .device = mesh.world->device(),
          .overlap = options.overlap,
          .prefetch = options.prefetch,
          .unused = options.unused,
          .hook = options.hook};
}

void move_buffers(Module& module, at::Device device) {
  for (auto& entry : module.named_buffers()) {
    at::Tensor buffer = entry.value();
    if (buffer.defined() && buffer.device() != device) buffer.set_data(buffer.to(device));
  }
}

bool is_container(const Module& module) {
  const std::string name = module.name();
  return name.find("SequentialImpl") != std::string::npos || name.find("ModuleListImpl") != std::string::npos;
}

bool has_parameters(const Module& module) {
  return !module.named_parameters().is_empty();
}

/// Children of the outermost containers, by path.
void find_blocks(const Module& module, const std::string& path, std::vector<std::string>& blocks) {
  for (const auto& child : module.named_children()) {
    const std::string place = path.empty() ? child.key() : path + "." + child.key();
    if (!has_parameters(*child.value())) continue;
    if (is_container(module)) {
      blocks.push_back(place);
    } else {
      find_blocks(*child.value(), place, blocks);
    }
  }
}

}  // namespace

std::vector<plan::UnitSpec> block_units(const Module& module, const std::vector<std::string>& asked) {
  std::vector<std::string> blocks = asked;
  if (blocks.empty()) find_blocks(module, "", blocks);
  std::vector<plan::UnitSpec> units = {{"root", {}}};
  for (const std::string& block : blocks) {
    for (const std::string& other : blocks) {
      TRIREME_CHECK(&other == &block || !(block + ".").starts_with(other + "."),
                    "[parallel.fully_shard] block {} lies within block {}; name one of them", block, other);
    }
    units.push_back({block, {}});
  }
  for (const plan::ParamSpec& param : param_specs(module)) {
    size_t owner = 0;
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (param.name.starts_with(blocks[i] + ".")) owner = i + 1;
    }
    units[owner].params.push_back(param);
  }
  for (size_t i = 1; i < units.size(); ++i) {
    TRIREME_CHECK(
        !units[i].params.empty(),
        "[parallel.fully_shard] there is no block {} with parameters in {}; name paths of submodules",
        units[i].name, module.name());
  }
  if (units.front().params.empty()) units.erase(units.begin());
  return units;
}

std::unique_ptr<DataParallel> data_parallel(Module& module, const comm::Mesh& mesh,
                                            const WrapOptions& options) {
  check_parameters(module, "data_parallel");
  const Options engine = engine_options(options, options.policy.empty() ? "ddp" : options.policy, mesh);
  if (engine.policy.shard_parameters) {
    throw ConfigError(
        "[parallel.data_parallel] {} shards parameters; use fully_shard, or ddp, zero1 or zero2",
        engine.policy.label());
  }
  const Initializer initializer = values_of(module, mesh);
  move_buffers(module, engine.device);
  const auto cap = static_cast<int64_t>(options.bucket_mib * (1 << 20));
  const auto units =
      plan::make_buckets(param_specs(module), c10::elementSize(engine.compute), std::max<int64_t>(1, cap));
  return std::make_unique<DataParallel>(module, units, mesh, engine, initializer, UseFrom::kBuckets);
}

std::unique_ptr<DataParallel> fully_shard(Module& module, const comm::Mesh& mesh,
                                          const WrapOptions& options) {
  check_parameters(module, "fully_shard");
  const Options engine = engine_options(options, options.policy.empty() ? "fsdp" : options.policy, mesh);
  const auto units = block_units(module, options.blocks);
  const Initializer initializer = values_of(module, mesh);
  move_buffers(module, engine.device);
  return std::make_unique<DataParallel>(module, units, mesh, engine, initializer, UseFrom::kOperators);
}

void sync_buffers(Module& module, const comm::Mesh& mesh) {
  for (const auto& entry : module.named_buffers()) {
    if (entry.value().defined() && entry.value().is_floating_point())
      broadcast_from_root(entry.value(), mesh);
  }
}

}  // namespace trireme::parallel
