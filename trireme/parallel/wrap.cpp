#include "trireme/parallel/wrap.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/parallel/module_parameters.h"
#include "trireme/parallel/unit_choice.h"
#include "trireme/plan/buckets.h"

namespace trireme::parallel {
namespace {

using torch::nn::Module;

/// All parameters decay alike, as in torch, unless a GroupRule says otherwise.
plan::ParamSpec spec_of(const std::string& name, const at::Tensor& tensor) {
  return {.name = name, .shape = tensor.sizes().vec(), .initial = {}, .decays = true};
}

std::vector<plan::ParamSpec> param_specs(const Module& module) {
  std::vector<plan::ParamSpec> specs;
  for (const ModuleParameter& param : module_parameters(module))
    specs.push_back(spec_of(param.name, param.tensor));
  return specs;
}

void check_parameters(const Module& module, const char* operation) {
  const auto params = module_parameters(module);
  TRIREME_CHECK(!params.empty(), "[parallel.{}] {} has no parameters", operation, module.name());
  const at::Tensor& first = params.front().tensor;
  for (const auto& [name, aliases, param] : params) {
    if (nn::has_lender(param)) {
      throw LogicError(
          "[parallel.{}] parameter {} of {} already belongs to an engine, so the module has been wrapped "
          "before; destroy that engine first",
          operation, name, module.name());
    }
    if (!param.is_floating_point() || param.device() != first.device()) {
      throw LogicError(
          "[parallel.{}] parameter {} is {} on {}, but {} is {} on {}; all must be floating point and on one "
          "device",
          operation, name, c10::toString(param.scalar_type()), param.device().str(), params.front().name,
          c10::toString(first.scalar_type()), first.device().str());
    }
    check_writable(name, param, fmt::format("parallel.{}", operation).c_str());
  }
  check_separate_memory(module);
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
  for (const ModuleParameter& param : module_parameters(module)) {
    broadcast_from_root(param.tensor, mesh);
    values.emplace(param.name, param.tensor.detach());
  }
  return [values](const std::string& name, int64_t first, at::Tensor& out) {
    out.copy_(values.at(name).reshape({-1}).narrow(0, first, out.numel()));
  };
}

Options engine_options(const WrapOptions& options, const std::string& policy, const comm::Mesh& mesh) {
  if (!(options.bucket_mib > 0.0))
    throw ConfigError("[parallel.options] bucket_mib is {}; set it above 0", options.bucket_mib);
  if (options.min_unit_numel < 0)
    throw ConfigError("[parallel.options] min_unit_numel is {}; set it to 0 or more elements",
                      options.min_unit_numel);
  return {.policy = plan::find_policy(policy),
          .compute = options.compute,
          .reduce = options.reduce,
          .accumulate = options.accumulate,
          .device = mesh.world->device(),
          .overlap = options.overlap,
          .prefetch = options.prefetch,
          .unused = options.unused,
          .average = options.average,
          .hook = options.hook,
          .users_module = true};
}

/// All that must be the same on all ranks, a line each.
std::vector<std::string> description_of(const Module& module, const WrapOptions& options,
                                        const Options& engine) {
  const HookOptions& hook = engine.hook;
  std::vector<std::string> lines = {fmt::format(
      "options: policy={} compute={} reduce={} accumulate={} overlap={} prefetch={} unused={} average={} "
      "bucket_mib={} min_unit_numel={} blocks=[{}] hook={} rank={} density={} start_step={} local_steps={}",
      engine.policy.label(), c10::toString(engine.compute), c10::toString(engine.reduce), engine.accumulate,
      engine.overlap, engine.prefetch, static_cast<int>(engine.unused), static_cast<int>(engine.average),
      options.bucket_mib, options.min_unit_numel, join(options.blocks, ", "), hook.hook, hook.rank,
      hook.density, hook.start_step, hook.local_steps)};
  for (const auto& [name, aliases, tensor] : module_parameters(module))
    lines.push_back(fmt::format("parameter {} {}[{}]{}{}", name, c10::toString(tensor.scalar_type()),
                                fmt::join(tensor.sizes(), ", "), tensor.requires_grad() ? "" : " frozen",
                                aliases.empty() ? "" : " also " + join(aliases, ", ")));
  lines.push_back("no further parameter");
  return lines;
}

/// The text of the first rank.
std::string text_of_first(std::string text, const comm::Mesh& mesh) {
  const c10::Device device = mesh.world->device();
  at::Tensor size = at::full({1}, static_cast<int64_t>(text.size()), at::kLong).to(device);
  mesh.dp->broadcast(size, 0);
  text.resize(static_cast<size_t>(size.item<int64_t>()));
  at::Tensor bytes =
      at::from_blob(text.data(), {static_cast<int64_t>(text.size())}, at::kByte).clone().to(device);
  mesh.dp->broadcast(bytes, 0);
  const at::Tensor host = bytes.cpu();
  return {static_cast<const char*>(host.const_data_ptr()), text.size()};
}

/// Collectives tell parameters apart only by their order, so ranks compare their modules before the first
/// one.
void check_alike(const std::vector<std::string>& lines, const comm::Mesh& mesh, const char* operation) {
  const std::string mine = join(lines, "\n");
  const auto [upper, lower] = comm::in_halves(xxh3(mine));
  const auto hashes = comm::gather_scalars(*mesh.dp, {upper, lower});
  const auto other = std::ranges::find_if(hashes, [&](const auto& rank) { return rank != hashes.front(); });
  if (other == hashes.end()) return;
  const int64_t first_rank = mesh.dp->ranks().front(), rank = mesh.world->rank();
  const std::string first = text_of_first(mine, mesh);
  if (first == mine) {
    throw LogicError(
        "[parallel.{}] rank {} wraps a different module than rank {}, or with different options; its message "
        "names the first difference",
        operation, mesh.dp->ranks()[static_cast<size_t>(other - hashes.begin())], rank);
  }
  const std::vector<std::string> others = split(first, '\n');
  const auto differs = std::ranges::mismatch(lines, others);
  throw LogicError(
      "[parallel.{}] ranks wrap different modules: rank {} has '{}' where rank {} has '{}'; build the same "
      "module with the same options on all ranks, and register parameters in the same order",
      operation, rank, *differs.in1, first_rank, *differs.in2);
}

void move_buffers(Module& module, at::Device device) {
  for (auto& entry : module.named_buffers()) {
    at::Tensor buffer = entry.value();
    if (buffer.defined() && buffer.device() != device) buffer.set_data(buffer.to(device));
  }
}

/// Rank 0 says what was made of the module.
void announce(const DataParallel& engine, const Module& module, const comm::Mesh& mesh) {
  if (mesh.world->rank() != 0) return;
  log_info("fully_shard: {}, {}; engine->describe() lists the units", module.name(), engine.summary());
  if (engine.units().size() > 1) return;
  log_warning(
      "[parallel.fully_shard] all of {} is one unit, so its parameters are all gathered at once; list "
      "submodule paths in WrapOptions::blocks, or lower WrapOptions::min_unit_numel",
      module.name());
}

}  // namespace

std::vector<plan::UnitSpec> block_units(const Module& module, const std::vector<std::string>& asked,
                                        int64_t min_unit_numel) {
  const std::vector<std::string> blocks =
      asked.empty() ? choose_blocks(sizes_of(module), min_unit_numel) : asked;
  std::vector<plan::UnitSpec> units = {{"root", {}}};
  for (const std::string& block : blocks) {
    for (const std::string& other : blocks) {
      TRIREME_CHECK(&other == &block || !(block + ".").starts_with(other + "."),
                    "[parallel.fully_shard] block {} is inside block {}; list only one of them", block,
                    other);
    }
    units.push_back({block, {}});
  }
  const auto block_of = [&](const std::string& name) {
    const auto found =
        std::ranges::find_if(blocks, [&](const std::string& block) { return name.starts_with(block + "."); });
    return static_cast<size_t>(found - blocks.begin());
  };
  std::vector<bool> has_parameters(blocks.size() + 1);
  for (const auto& [name, aliases, tensor] : module_parameters(module)) {
    const size_t owner = block_of(name);
    units[owner == blocks.size() ? 0 : owner + 1].params.push_back(spec_of(name, tensor));
    has_parameters[owner] = true;
    for (const std::string& alias : aliases) has_parameters[block_of(alias)] = true;
  }
  for (size_t i = 0; i < blocks.size(); ++i) {
    TRIREME_CHECK(
        has_parameters[i],
        "[parallel.fully_shard] there is no block {} with parameters in {}; list paths of its submodules",
        blocks[i], module.name());
  }
  // A block whose parameters all have their first name elsewhere lies in the units of that place.
  std::erase_if(units, [](const plan::UnitSpec& unit) { return unit.params.empty(); });
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
  check_alike(description_of(module, options, checked(engine)), mesh, "data_parallel");
  const Initializer initializer = values_of(module, mesh);
  move_buffers(module, engine.device);
  const auto units = plan::make_buckets(param_specs(module), c10::elementSize(engine.compute),
                                        plan::bucket_bytes(options.bucket_mib));
  return std::make_unique<DataParallel>(module, units, mesh, engine, initializer, UseFrom::kBuckets);
}

std::unique_ptr<DataParallel> fully_shard(Module& module, const comm::Mesh& mesh,
                                          const WrapOptions& options) {
  check_parameters(module, "fully_shard");
  const Options engine = engine_options(options, options.policy.empty() ? "fsdp" : options.policy, mesh);
  const auto units = block_units(module, options.blocks, options.min_unit_numel);
  check_alike(description_of(module, options, checked(engine)), mesh, "fully_shard");
  const Initializer initializer = values_of(module, mesh);
  move_buffers(module, engine.device);
  auto made = std::make_unique<DataParallel>(module, units, mesh, engine, initializer, UseFrom::kOperators);
  announce(*made, module, mesh);
  return made;
}

void sync_buffers(Module& module, const comm::Mesh& mesh) {
  std::vector<at::Tensor> buffers;
  for (const auto& entry : module.named_buffers()) {
    if (!entry.value().defined() || !entry.value().is_floating_point()) continue;
    check_writable(entry.key(), entry.value(), "parallel.sync_buffers");
    buffers.push_back(entry.value());
  }
  for (const at::Tensor& buffer : buffers) broadcast_from_root(buffer, mesh);
}

}  // namespace trireme::parallel
