#include "trireme/cli/run_plan.h"

#include <nlohmann/json.hpp>

#include "trireme/base/build_info.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/buckets.h"
#include "trireme/plan/memory.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;
using plan::Device;

std::string batch_equation(const plan::BatchPlan& batch) {
  return fmt::format("{} sequences = {} micro-batch x {} accumulation x {} data-parallel ranks",
                     batch.global_batch, batch.micro_batch, batch.accumulation, batch.dp_size);
}

std::string state_text(const plan::StateBytes& state) {
  const auto bytes = [](int64_t value) { return format_bytes(static_cast<double>(value)); };
  return fmt::format("{} a rank: parameters {}, gradients {}, optimizer {}; activations not included",
                     bytes(state.total()), bytes(state.parameters), bytes(state.gradients),
                     bytes(state.optimizer));
}

}  // namespace

plan::Device choose_device(plan::Device device, int gpus) {
  if (device == Device::kAuto) return kHasCuda && gpus > 0 ? Device::kCuda : Device::kCpu;
  if (device != Device::kCuda) return device;
  if (!kHasCuda) {
    throw EnvironmentError(
        "[cli.train] device is cuda but this build has no CUDA; build with -DTRIREME_CUDA=ON, or "
        "use --device=cpu");
  }
  if (gpus == 0) {
    throw EnvironmentError(
        "[cli.train] device is cuda but the driver shows no GPU; check nvidia-smi and "
        "CUDA_VISIBLE_DEVICES, or use --device=cpu");
  }
  return device;
}

int64_t choose_ranks(std::optional<int64_t> asked, plan::Device device, int gpus) {
  constexpr int64_t kCpuRanks = 2;
  if (!asked) return device == Device::kCuda ? gpus : kCpuRanks;
  if (*asked < 1) throw ConfigError("[cli.train] -n {} is not a number of ranks; give 1 or more", *asked);
  if (device == Device::kCuda && *asked > gpus) {
    throw ConfigError(
        "[cli.train] -n {} asks for more ranks than there are GPUs: {}; use -n {}, or --device=cpu", *asked,
        gpus, gpus);
  }
  return *asked;
}

RunPlan plan_run(const plan::Config& config, plan::Device device, int64_t ranks) {
  if (device == Device::kCpu && config.precision.compute == plan::Dtype::kFp16) {
    throw ConfigError(
        "[cli.train] precision.compute=fp16 on the CPU, whose kernels know fp32 and bf16; use bf16, or a "
        "GPU");
  }
  RunPlan run{.device = device, .ranks = ranks, .mesh = {}, .batch = {}, .facts = {}, .state = {}};
  run.mesh = plan::MeshShape::fit(config.parallel, ranks);
  run.batch = plan::plan_batch(config.train.global_batch, config.train.micro_batch, run.mesh.dp_size());
  run.facts = plan::describe(config.model, config.data.seq_len, config.precision, config.memory);
  run.state = plan::engine_state(plan::engine_units(config, run.facts),
                                 plan::engine_setting(config, run.mesh, run.batch.accumulation));
  return run;
}

report::CostRow predicted_cost(const plan::Config& config, const RunPlan& run, const plan::Policy& policy) {
  plan::EngineSetting setting = plan::engine_setting(config, run.mesh, run.batch.accumulation);
  setting.policy = policy;
  const std::vector<plan::UnitSpec> units = plan::engine_units(config, run.facts);
  const plan::StateBytes state = plan::engine_state(units, setting);
  report::CostRow row;
  row.policy = policy.label();
  row.cost.predicted = {state.parameters, state.gradients, state.optimizer};
  row.cost.predicted_wire_bytes = plan::engine_wire_bytes(units, setting);
  row.cost.predicted_activation_bytes =
      plan::activation_bytes(run.facts, run.batch.micro_batch * config.data.seq_len);
  return row;
}

std::string to_text(const RunPlan& run, const plan::Config& config) {
  report::Table table({{"plan"}, {config.name}});
  table.add_row({"ranks", fmt::format("{} on {}", run.ranks, run.device)});
  table.add_row({"mesh", run.mesh.to_string()});
  const plan::Policy policy = plan::resolve_policy(config.parallel, run.mesh);
  table.add_row({"policy", fmt::format("{}: {}", policy.label(), policy.summary)});
  table.add_row({"batch", batch_equation(run.batch)});
  table.add_row(
      {"tokens",
       fmt::format("{} a step, {} in {} steps", with_commas(run.batch.global_batch * config.data.seq_len),
                   format_count(static_cast<double>(run.batch.global_batch * config.data.seq_len) *
                                static_cast<double>(config.train.steps)),
                   config.train.steps)});
  table.add_row(
      {"model", fmt::format("{}, {} parameters", config.model.family, with_commas(run.facts.params))});
  table.add_row({"compute", fmt::format("{} FLOPs a token", format_count(run.facts.flops_per_token))});
  table.add_row({"model state", state_text(run.state)});
  return table.to_string();
}

std::string to_json(const RunPlan& run, const plan::Config& config) {
  const Json batch = {{"global_batch", run.batch.global_batch},
                      {"micro_batch", run.batch.micro_batch},
                      {"accumulation", run.batch.accumulation},
                      {"dp_size", run.batch.dp_size}};
  const Json state = {{"parameters", run.state.parameters},
                      {"gradients", run.state.gradients},
                      {"optimizer", run.state.optimizer},
                      {"total", run.state.total()}};
  return Json{{"schema", "trireme.run-plan/1"},
              {"name", config.name},
              {"device", plan::name(run.device)},
              {"ranks", run.ranks},
              {"mesh", run.mesh.to_string()},
              {"policy", plan::name(config.parallel.policy)},
              {"batch", batch},
              {"steps", config.train.steps},
              {"tokens_per_step", run.batch.global_batch * config.data.seq_len},
              {"params", run.facts.params},
              {"flops_per_token", run.facts.flops_per_token},
              {"state_bytes_per_rank", state}}
      .dump(2);
}

}  // namespace trireme::cli
