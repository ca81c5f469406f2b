#include <nlohmann/json.hpp>

#include "trireme/cli/step_figures.h"
#include "trireme/cli/step_view.h"
#include "trireme/plan/unit_buffers.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;
using plan::Action;
using plan::HeldBytes;
using plan::Pass;
using plan::Role;
using plan::StepProgram;

Json json_of(const HeldBytes& held) {
  Json bytes = Json::object();
  for (const Role role : plan::all_values<Role>()) {
    if (held[role] != 0) bytes[std::string(name(role))] = held[role];
  }
  bytes["total"] = held.total();
  return bytes;
}

Json json_of(int64_t micro_batch) {
  return micro_batch == Action::kOnceAStep ? Json() : Json(micro_batch);
}

Json units_json(const StepView& view) {
  Json units = Json::array();
  for (const plan::ProgramUnit& unit : view.program.units) {
    Json row = {{"name", unit.name},
                {"elements", unit.numel},
                {"frozen", unit.frozen},
                {"nf4", unit.nf4.has_value()},
                {"trainable", unit.trainable},
                {"activation_bytes", unit.activation_bytes},
                {"between_halves_bytes", unit.between_halves_bytes}};
    if (view.rank) {
      const Ranges of = ranges_of(*view.planned, *view.rank, unit.numel);
      row["keeps"] = {of.begin, of.end};
      row["updates"] = {of.update_begin, of.update_end};
    }
    units.push_back(std::move(row));
  }
  return units;
}

Json buffers_json(const StepProgram& program) {
  Json buffers = Json::array();
  for (const plan::Buffer& buffer : program.buffers) {
    buffers.push_back({{"role", name(buffer.role)},
                       {"unit", unit_name(program, buffer.unit)},
                       {"micro_batch", json_of(buffer.micro_batch)},
                       {"bytes", buffer.bytes},
                       {"part_of", buffer.part_of ? Json(name(*buffer.part_of)) : Json()},
                       {"from", buffer.is_kept() ? Json() : Json(buffer.from)},
                       {"to", buffer.is_kept() ? Json() : Json(buffer.to)}});
  }
  return buffers;
}

Json action_json(const StepProgram& program, const StepMemory& memory, int64_t at) {
  const Action& action = program.actions[static_cast<size_t>(at)];
  Json transfers = Json::array();
  for (const plan::Transfer& transfer : action.transfers) {
    transfers.push_back({{"collective", name(transfer.collective)},
                         {"ranks", transfer.ranks},
                         {"bytes", transfer.bytes},
                         {"along", name(transfer.along)}});
  }
  return {{"action", at},
          {"lane", name(action.lane)},
          {"kind", name(action.kind)},
          {"unit", action.unit == Action::kWholeModel ? Json() : Json(unit_name(program, action.unit))},
          {"micro_batch", json_of(action.micro_batch)},
          {"peer", action.peer < 0 ? Json() : Json(action.peer)},
          {"transfers", transfers},
          {"sent_bytes", action.wire_bytes()},
          {"held_bytes", json_of(memory.at(at))},
          {"held_bytes_after", memory.total_after(at)}};
}

Json passes_json(const StepProgram& program, const StepMemory& memory) {
  Json passes = Json::array();
  for (const Pass& pass : program.passes) {
    Json actions = Json::array();
    for (int64_t at = pass.begin; at < pass.end; ++at) actions.push_back(action_json(program, memory, at));
    passes.push_back(
        {{"kind", name(pass.kind)}, {"micro_batch", json_of(pass.micro_batch)}, {"actions", actions}});
  }
  return passes;
}

}  // namespace

std::string to_json(const StepView& view) {
  const StepMemory memory(view.program);
  const Sent sent = sent_by(view);
  const std::string obstacle = obstacle_to_recording(view);
  Json json = {{"schema", "trireme.step/1"}, {"name", view.name}};
  if (view.planned) {
    const RunPlan& run = *view.planned;
    const plan::Config& config = run.config;
    const auto setting = plan::engine_setting(config, run.mesh, run.batch.accumulation, run.device);
    json["device"] = plan::name(run.device);
    json["ranks"] = run.ranks;
    json["mesh"] = run.mesh.to_string();
    json["policy"] = setting.policy.label();
    json["beside"] = setting.beside;
    json["prefetch"] = setting.prefetch;
  }
  if (view.rank) json["rank"] = *view.rank;
  json["micro_batches"] = view.micro_batches;
  json["units"] = units_json(view);
  json["buffers"] = buffers_json(view.program);
  json["passes"] = passes_json(view.program, memory);
  const auto known = [](std::optional<int64_t> bytes) { return bytes ? Json(*bytes) : Json(); };
  json["sent_bytes_per_step"] = {{"parameters", sent.parameters},
                                 {"gradients", known(sent.gradients)},
                                 {"boundaries", sent.boundaries},
                                 {"activations", sent.activations},
                                 {"total", known(sent.total())}};
  json["peak"] = {{"action", memory.peak()}, {"held_bytes", json_of(memory.at(memory.peak()))}};
  json["recording_obstacle"] = obstacle.empty() ? Json() : Json(obstacle);
  return json.dump(2);
}

}  // namespace trireme::cli
