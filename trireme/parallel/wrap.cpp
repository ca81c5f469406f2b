#include "trireme/parallel/wrap.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/error_of.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"
#include "trireme/nn/torch_internals.h"
#include "trireme/parallel/agreement.h"
#include "trireme/parallel/has_parts.h"
#include "trireme/parallel/module_parameters.h"
#include "trireme/parallel/unit_choice.h"
#include "trireme/plan/buckets.h"
#include "trireme/plan/stored_dtype.h"

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

bool is_cut(const Parts& parts, const std::string& name) {
  const auto found = parts.find(name);
  return found != parts.end() && !found->second.is_whole();
}

void note_parts(std::vector<plan::UnitSpec>& units, const Parts& parts) {
  for (plan::UnitSpec& unit : units) {
    for (plan::ParamSpec& param : unit.params) {
      if (const auto found = parts.find(param.name); found != parts.end()) param.part = found->second;
    }
  }
}

/// The sizes of cut parameters where ranks along tp, whose parts may differ in size, choose alike.
std::map<std::string, int64_t> equal_shares(const Parts& parts, const comm::Mesh& mesh) {
  std::map<std::string, int64_t> shares;
  for (const auto& [name, part] : parts)
    if (!part.is_whole()) shares[name] = *plan::checked_numel(part.whole) / mesh.tp->size();
  return shares;
}

/// Buckets hold the same parameters on all ranks along tp, which add up the gradients of copies bucket by
/// bucket: of parts they count equal shares.
std::vector<plan::UnitSpec> buckets_of(const Module& module, const Parts& parts, const comm::Mesh& mesh,
                                       int64_t element_bytes, int64_t cap_bytes) {
  std::vector<plan::ParamSpec> specs = param_specs(module);
  std::map<std::string, plan::Shape> shapes;
  const auto shares = equal_shares(parts, mesh);
  for (plan::ParamSpec& spec : specs) {
    shapes[spec.name] = spec.shape;
    if (const auto share = shares.find(spec.name); share != shares.end()) spec.shape = {share->second};
  }
  std::vector<plan::UnitSpec> buckets = plan::make_buckets(specs, element_bytes, cap_bytes);
  for (plan::UnitSpec& bucket : buckets) {
    for (plan::ParamSpec& spec : bucket.params) spec.shape = shapes.at(spec.name);
  }
  note_parts(buckets, parts);
  return buckets;
}

/// Before training, not at the first save. Throws LogicError for a name or a dtype that files of weights do
/// not have.
void check_storable(const std::string& name, const at::Tensor& tensor, const Module& module,
                    const char* operation) {
  if (!is_utf8(name) || name == "__metadata__")
    throw LogicError(
        "[parallel.{}] {} of {} has a name that files of weights cannot have: it is {}; register it under "
        "another name",
        operation, printable(name), module.name(), is_utf8(name) ? "reserved" : "not UTF-8");
  const bool strided = tensor.layout() == at::kStrided && !tensor.is_quantized();
  if (strided && !plan::stored_dtype(c10::toString(tensor.scalar_type())).empty()) return;
  throw LogicError(
      "[parallel.{}] {} of {} is {}, {}, which files of weights cannot hold, so its first save would fail; "
      "register it in another form, or keep it as a plain member of the module",
      operation, name, module.name(), c10::toString(tensor.scalar_type()), c10::str(tensor.layout()));
}

void check_buffers(const Module& module, const char* operation) {
  for (const auto& entry : module.named_buffers()) {
    if (entry.value().defined()) check_storable(entry.key(), entry.value(), module, operation);
  }
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
    if (!param.is_floating_point())
      throw LogicError(
          "[parallel.{}] parameter {} of {} is {}, but the engine trains floating-point ones; register what "
          "is not trained as a buffer, and the parts of a complex parameter as two",
          operation, name, module.name(), c10::toString(param.scalar_type()));
    check_storable(name, param, module, operation);
    for (const std::string& alias : aliases) check_storable(alias, param, module, operation);
    if (param.scalar_type() == at::kDouble)
      throw LogicError(
          "[parallel.{}] parameter {} of {} is Double, but the engine's masters are fp32, which would round "
          "it; "
          "convert it before by parameter.set_data(parameter.to(at::kFloat)), or train it without an engine",
          operation, name, module.name());
    if (param.device() != first.device())
      throw LogicError(
          "[parallel.{}] parameter {} of {} is on {}, but {} is on {}; move the module to one device",
          operation, name, module.name(), param.device().str(), params.front().name, first.device().str());
    check_writable(name, param, fmt::format("parallel.{}", operation).c_str());
  }
  check_separate_memory(module);
  check_no_other_holder(module, fmt::format("parallel.{}", operation).c_str());
}

/// The elements that have memory of their own, of which expand() shows each several times.
at::Tensor without_repeats(at::Tensor tensor) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) tensor = tensor.narrow(dim, 0, 1);
  }
  return tensor;
}

/// As bytes, so that tensors of every dtype travel.
void broadcast_from_root(const at::Tensor& tensor, comm::Group& group) {
  if (tensor.numel() == 0) return;
  const at::NoGradGuard no_grad;
  const c10::InferenceMode as_it_was_made(tensor.is_inference());  // or nothing could be written to it
  const at::Tensor place = without_repeats(tensor.detach());
  at::Tensor values = at::empty({place.numel()}, place.options().device(group.device()));
  values.copy_(place.reshape({-1}));
  at::Tensor bytes = values.view(at::kByte);
  group.broadcast(bytes, 0);
  place.copy_(values.view(place.sizes()));
}

void broadcast_buffers(const Module& module, comm::Group& group) {
  for (const auto& entry : module.named_buffers()) {
    if (entry.value().defined()) broadcast_from_root(entry.value(), group);
  }
}

/// A parameter's elements as rank 0 had them, or those of a part as the first rank that has the part.
Initializer values_of(const Module& module, const Parts& parts, const comm::Mesh& mesh) {
  std::map<std::string, at::Tensor> values;
  for (const ModuleParameter& param : module_parameters(module)) {
    broadcast_from_root(param.tensor, is_cut(parts, param.name) ? *mesh.dp : *mesh.stage);
    values.emplace(param.name, param.tensor.detach());
  }
  return [values](const std::string& name, const plan::Region& region, at::Tensor& out) {
    // The box of the region is what the module has.
    out.copy_(values.at(name).reshape({-1}).narrow(0, region.range.begin, region.range.size()));
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

/// A line each.
std::vector<std::string> description_of_buffers(const Module& module) {
  std::vector<std::string> lines;
  for (const auto& entry : module.named_buffers()) {
    const at::Tensor& tensor = entry.value();
    lines.push_back(tensor.defined()
                        ? fmt::format("buffer {} {}[{}]", entry.key(), c10::toString(tensor.scalar_type()),
                                      fmt::join(tensor.sizes(), ", "))
                        : fmt::format("buffer {} undefined", entry.key()));
  }
  lines.push_back("no further buffer");
  return lines;
}

/// A text that is the same for the parts that ranks along tp have of one parameter.
std::string shape_of(const ModuleParameter& param, const Parts& parts) {
  if (!is_cut(parts, param.name)) return fmt::format("[{}]", fmt::join(param.tensor.sizes(), ", "));
  const plan::Part& part = parts.at(param.name);
  return fmt::format("a part of [{}]{}", fmt::join(part.whole, ", "),
                     part.view.empty() ? "" : fmt::format(" as [{}]", fmt::join(part.view, ", ")));
}

/// All that must be the same on all ranks, a line each.
std::vector<std::string> description_of(const Module& module, const Parts& parts, const WrapOptions& options,
                                        const Options& engine) {
  const HookOptions& hook = engine.hook;
  std::vector<std::string> lines = {fmt::format(
      "options: policy={} compute={} reduce={} accumulate={} overlap={} prefetch={} unused={} average={} "
      "bucket_mib={} min_unit_numel={} blocks=[{}] hook={} rank={} density={} start_step={} local_steps={}",
      engine.policy.label(), c10::toString(engine.compute), c10::toString(engine.reduce), engine.accumulate,
      engine.overlap, engine.prefetch, static_cast<int>(engine.unused), static_cast<int>(engine.average),
      options.bucket_mib, options.min_unit_numel, join(options.blocks, ", "), hook.hook, hook.rank,
      hook.density, hook.start_step, hook.local_steps)};
  for (const ModuleParameter& param : module_parameters(module))
    lines.push_back(fmt::format("parameter {} {}{}{}{}", param.name,
                                c10::toString(param.tensor.scalar_type()), shape_of(param, parts),
                                param.tensor.requires_grad() ? "" : " frozen",
                                param.aliases.empty() ? "" : " also " + join(param.aliases, ", ")));
  lines.push_back("no further parameter");
  for (std::string& line : description_of_buffers(module)) lines.push_back(std::move(line));
  return lines;
}

void move_buffers(Module& module, at::Device device) {
  for (auto& entry : module.named_buffers()) {
    at::Tensor buffer = entry.value();
    if (buffer.defined() && buffer.device() != device) buffer.set_data(buffer.to(device));
  }
}

/// Gradients that a hook makes smaller with what lies beside them differ on ranks along tp, whose sums are
/// those of redistribute().
void check_along_tp(const Options& engine, const comm::Mesh& mesh) {
  if (mesh.tp->size() > 1 && engine.compute == at::kHalf) {
    throw ConfigError(
        "[parallel.options] compute is Half, but {} ranks along tp add up activations in Float or BFloat16; "
        "set it to one of them",
        mesh.tp->size());
  }
  using enum Hook;
  const Hook hook = engine.hook.hook;
  if (mesh.tp->size() == 1 || (hook != kInt8 && hook != kTopK && hook != kPowerSgd)) return;
  throw ConfigError(
      "[parallel.options] hook is {}, but with {} ranks along tp the copies of parameters would drift apart; "
      "set it to none, fp16 or local_sgd",
      hook, mesh.tp->size());
}

/// The form that a module takes: how its engine works, and which parts of parameters it has.
struct Prepared {
  Options engine;
  Parts parts;
};

/// Checks all that can be checked, on all ranks together, and gives the module's buffers rank 0's values.
/// `check` is for what one kind of engine asks, and says what else must be the same on all ranks.
Prepared prepare(Module& module, const comm::Mesh& mesh, const WrapOptions& options, const char* policy,
                 const char* operation,
                 const std::function<std::vector<std::string>(const Prepared&)>& check) {
  Prepared made;
  std::vector<std::string> lines;
  const auto refusal = error_of([&] {
    check_parameters(module, operation);
    check_buffers(module, operation);
    made.parts = parts_on(module, mesh);
    made.engine = checked(engine_options(options, options.policy.empty() ? policy : options.policy, mesh));
    check_along_tp(made.engine, mesh);
    const std::vector<std::string> more = check(made);
    lines = description_of(module, made.parts, options, made.engine);
    lines.insert(lines.end(), more.begin(), more.end());
  });
  check_alike(lines, refusal, mesh, operation);
  check_cover(module, made.parts, mesh);
  check_buffers_alike(module, made.parts, mesh);
  move_buffers(module, made.engine.device);
  broadcast_buffers(module, *mesh.stage);
  return made;
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
                                        int64_t min_unit_numel,
                                        const std::map<std::string, int64_t>& shares) {
  const std::vector<std::string> blocks =
      asked.empty() ? choose_blocks(sizes_of(module, shares), min_unit_numel) : asked;
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
  const auto no_shards = [](const Prepared& made) -> std::vector<std::string> {
    if (!made.engine.policy.shard_parameters) return {};
    throw ConfigError(
        "[parallel.data_parallel] {} shards parameters; use fully_shard, or ddp, zero1 or zero2",
        made.engine.policy.label());
  };
  const auto [engine, parts] = prepare(module, mesh, options, "ddp", "data_parallel", no_shards);
  const Initializer initializer = values_of(module, parts, mesh);
  const auto units = buckets_of(module, parts, mesh, static_cast<int64_t>(c10::elementSize(engine.compute)),
                                plan::bucket_bytes(options.bucket_mib));
  return std::make_unique<DataParallel>(module, units, mesh, engine, initializer, UseFrom::kBuckets);
}

std::unique_ptr<DataParallel> fully_shard(Module& module, const comm::Mesh& mesh,
                                          const WrapOptions& options) {
  std::vector<plan::UnitSpec> units;
  const auto choose = [&](const Prepared& made) {
    units = block_units(module, options.blocks, options.min_unit_numel, equal_shares(made.parts, mesh));
    std::vector<std::string> names;
    for (const plan::UnitSpec& unit : units) names.push_back("unit " + unit.name);
    return names;
  };
  const auto [engine, parts] = prepare(module, mesh, options, "fsdp", "fully_shard", choose);
  note_parts(units, parts);
  const Initializer initializer = values_of(module, parts, mesh);
  auto made = std::make_unique<DataParallel>(module, units, mesh, engine, initializer, UseFrom::kOperators);
  announce(*made, module, mesh);
  return made;
}

void sync_buffers(Module& module, const comm::Mesh& mesh) {
  check_alike(description_of_buffers(module), {}, mesh, "sync_buffers");
  // Ranks along tp may have buffers that go with their parts by now.
  broadcast_buffers(module, mesh.tp->size() > 1 ? *mesh.dp : *mesh.stage);
}

}  // namespace trireme::parallel
