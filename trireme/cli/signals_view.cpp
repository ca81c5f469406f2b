#include "trireme/cli/signals_view.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "trireme/base/text.h"
#include "trireme/cli/placement_view.h"
#include "trireme/cli/words.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using SignalsJson = nlohmann::ordered_json;
using plan::Action;
using plan::ActionKind;
using plan::Signal;
using plan::SignalBoundary;
using plan::SignalStage;
using report::Align;

std::string numbers_text(const std::vector<int64_t>& numbers) {
  return fmt::format("{}", fmt::join(numbers, " "));
}

/// Bytes that all workers of a stage together send to the next one for a micro-batch, and get back.
struct Crossing {
  int64_t activations = 0, gradients = 0;
};

const SignalGroup* group_at(const SignalsView& view, int64_t place) {
  const auto found = std::ranges::find(view.groups, place, &SignalGroup::place);
  return found == view.groups.end() ? nullptr : &*found;
}

/// The bytes that the workers at `place` send for the first micro-batch to the pass of `stage`.
int64_t sent_to(const SignalsView& view, int64_t place, int64_t stage, plan::Message message) {
  const SignalGroup* const group = group_at(view, place);
  if (group == nullptr) return 0;
  int64_t bytes = 0;
  for (const Action& action : group->program.actions) {
    if (action.kind == ActionKind::kSend && action.micro_batch == 0 && action.stage == stage &&
        action.message == message)
      bytes += action.wire_bytes();
  }
  return bytes * std::ssize(view.signals.groups[static_cast<size_t>(place)]);
}

Crossing crossing_of(const SignalsView& view, const SignalBoundary& boundary) {
  const auto place = [&](int64_t stage) { return view.signals.stages[static_cast<size_t>(stage)].place; };
  return {sent_to(view, place(boundary.from), boundary.to, plan::Message::kActivation),
          sent_to(view, place(boundary.to), boundary.from, plan::Message::kGradient)};
}

/// The bytes that each worker of a stage sends the others in a pass of a unit: of one micro-batch, or when
/// gradients of a step are reduced.
struct Exchange {
  int64_t stage = 0;
  std::string unit, pass;
  int64_t gathered = 0, summed = 0;
};

std::string pass_word(ActionKind kind) {
  if (kind == ActionKind::kReduce) return "gradients";
  return kind == ActionKind::kForward ? "forward" : "backward";
}

std::vector<Exchange> exchanges_of(const SignalGroup& group) {
  std::vector<Exchange> found;
  for (const Action& action : group.program.actions) {
    if (action.micro_batch > 0 && action.kind != ActionKind::kReduce) continue;
    Exchange next{.stage = action.stage, .unit = "the whole model", .pass = pass_word(action.kind)};
    if (action.unit >= 0) next.unit = group.program.units[static_cast<size_t>(action.unit)].name;
    for (const plan::Transfer& transfer : action.transfers_along(plan::Along::kTp)) {
      const bool gathers = transfer.collective == plan::Collective::kAllGather;
      (gathers ? next.gathered : next.summed) += transfer.bytes;
    }
    const bool is_new = std::ranges::none_of(
        found, [&](const Exchange& one) { return one.unit == next.unit && one.pass == next.pass; });
    if (is_new && next.gathered + next.summed > 0) found.push_back(next);
  }
  return found;
}

std::string tensors_text(const Signal& signal) {
  if (!signal.placement.is_shard()) return "on every worker";
  return fmt::format("split along axis {}", signal.placement.dim);
}

std::string heading(const SignalsView& view, int64_t columns) {
  report::Table table({{"signals"}, {view.file}});
  table.add_row({"workers", fmt::format("{} in {} of {}", view.signals.workers(),
                                        counted(std::ssize(view.signals.stages), "stage"),
                                        counted(std::ssize(view.signals.groups), "list"))});
  const std::string obstacle = plan::mesh_obstacle(view.signals);
  if (!obstacle.empty()) {
    table.add_row({"mesh", "none: " + obstacle});
  } else {
    std::vector<std::string> options;
    for (const std::string& key : view.keys) options.push_back("--" + key);
    table.add_row({"mesh", fmt::format("what -n {} {} says", view.signals.workers(), join(options, " "))});
  }
  if (!view.groups.empty()) {
    table.add_row({"model", fmt::format("{}, micro-batches of {} x {} tokens", view.model,
                                        view.batch.micro_batch, view.seq_len)});
  }
  table.add_row({"runs", view.keys.empty() ? "a program of your own, by TRIREME_CONFIG"
                                           : "'trireme train' with these keys; a program of your own, by "
                                             "TRIREME_CONFIG"});
  return table.to_string(columns);
}

std::string signals_table(const SignalsView& view, int64_t columns) {
  report::Table table({{"signal"}, {"workers"}, {"its tensors"}, {"compiled"}, {"gradients"}, {"line"}});
  const auto add = [&](const Signal& signal) {
    table.add_row({signal.name, numbers_text(signal.workers), tensors_text(signal),
                   signal.compile ? "together" : "-", signal.backward.empty() ? "alike" : signal.backward,
                   signal.at});
  };
  for (const SignalStage& stage : view.signals.stages) add(stage.all), add(stage.column), add(stage.row);
  for (const Signal* scope : view.signals.scopes()) add(*scope);
  return "\n" + table.to_string(columns);
}

std::string worker_lists(const SignalsView& view, int64_t columns) {
  if (view.groups.empty()) return "";
  report::Table table({{"workers"}, {"stages"}});
  for (const SignalGroup& group : view.groups) {
    table.add_row(
        {numbers_text(view.signals.groups[static_cast<size_t>(group.place)]), join(group.stages, "; ")});
  }
  return "\n" + table.to_string(columns);
}

std::string boundaries_table(const SignalsView& view, int64_t columns) {
  if (view.signals.boundaries.empty() || view.groups.size() < view.signals.groups.size()) return "";
  report::Table table({{"boundary"},
                       {"from"},
                       {"to"},
                       {"activations", Align::kRight},
                       {"gradients", Align::kRight},
                       {"for a micro-batch"}});
  for (const SignalBoundary& boundary : view.signals.boundaries) {
    const auto& stages = view.signals.stages;
    const SignalStage &from = stages[static_cast<size_t>(boundary.from)],
                      &to = stages[static_cast<size_t>(boundary.to)];
    const Crossing bytes = crossing_of(view, boundary);
    const bool stays = from.place == to.place;
    table.add_row({boundary.name, numbers_text(from.all.workers), numbers_text(to.all.workers),
                   stays ? "-" : bytes_text(bytes.activations), stays ? "-" : bytes_text(bytes.gradients),
                   stays ? "stays on its workers" : "sent by all workers together"});
  }
  return "\n" + table.to_string(columns);
}

std::string exchanges_table(const SignalsView& view, int64_t columns) {
  report::Table table({{"stage", Align::kRight},
                       {"a worker sends along tp"},
                       {"in"},
                       {"gathers", Align::kRight},
                       {"sums", Align::kRight}});
  bool any = false;
  for (const SignalGroup& group : view.groups) {
    for (const Exchange& one : exchanges_of(group)) {
      table.add_row(
          {std::to_string(one.stage), one.unit, one.pass, bytes_text(one.gathered), bytes_text(one.summed)});
      any = true;
    }
  }
  return any ? "\n" + table.to_string(columns) : "";
}

SignalsJson signal_json(const Signal& signal) {
  return {{"name", signal.name},
          {"workers", signal.workers},
          {"placement", signal.placement.is_shard() ? "shard" : "replicate"},
          {"axis", signal.placement.is_shard() ? SignalsJson(signal.placement.dim) : SignalsJson()},
          {"backward", signal.backward.empty() ? SignalsJson() : SignalsJson(signal.backward)},
          {"compile", signal.compile},
          {"at", signal.at}};
}

SignalsJson stages_json(const SignalsView& view) {
  SignalsJson rows = SignalsJson::array();
  for (int64_t index = 0; index < std::ssize(view.signals.stages); ++index) {
    const SignalStage& stage = view.signals.stages[static_cast<size_t>(index)];
    rows.push_back({{"stage", index},
                    {"group", stage.place},
                    {"signal", signal_json(stage.all)},
                    {"column", signal_json(stage.column)},
                    {"row", signal_json(stage.row)}});
  }
  return rows;
}

SignalsJson boundaries_json(const SignalsView& view) {
  SignalsJson rows = SignalsJson::array();
  for (const SignalBoundary& boundary : view.signals.boundaries) {
    SignalsJson row = {{"name", boundary.name},
                       {"from", boundary.from},
                       {"to", boundary.to},
                       {"declared", boundary.declared}};
    if (view.groups.size() == view.signals.groups.size()) {
      const Crossing bytes = crossing_of(view, boundary);
      row["activation_bytes"] = bytes.activations;
      row["gradient_bytes"] = bytes.gradients;
    }
    rows.push_back(row);
  }
  return rows;
}

SignalsJson group_json(const SignalsView& view, const SignalGroup& group) {
  SignalsJson exchanges = SignalsJson::array();
  for (const Exchange& one : exchanges_of(group)) {
    exchanges.push_back({{"stage", one.stage},
                         {"unit", one.unit},
                         {"pass", one.pass},
                         {"all_gather_bytes", one.gathered},
                         {"sum_bytes", one.summed}});
  }
  SignalsJson row = {{"workers", view.signals.groups[static_cast<size_t>(group.place)]},
                     {"worker", group.worker},
                     {"stages", group.stages},
                     {"tp", exchanges}};
  row.update(placement_json(group.params));
  return row;
}

}  // namespace

std::string to_text(const SignalsView& view, int64_t columns) {
  std::string text = heading(view, columns) + worker_lists(view, columns) + signals_table(view, columns) +
                     boundaries_table(view, columns) + exchanges_table(view, columns);
  for (const SignalGroup& group : view.groups)
    text += "\n" + placement_table(fmt::format("worker {}", group.worker), group.params, columns);
  return text;
}

SignalsJson to_json(const SignalsView& view) {
  SignalsJson scopes = SignalsJson::array(), groups = SignalsJson::array();
  for (const Signal* scope : view.signals.scopes()) scopes.push_back(signal_json(*scope));
  for (const SignalGroup& group : view.groups) groups.push_back(group_json(view, group));
  const std::string obstacle = plan::mesh_obstacle(view.signals);
  return {{"schema", "trireme.signals/1"},
          {"file", view.file},
          {"workers", view.signals.workers()},
          {"keys", view.keys},
          {"obstacle", obstacle.empty() ? SignalsJson() : SignalsJson(obstacle)},
          {"stages", stages_json(view)},
          {"scopes", scopes},
          {"boundaries", boundaries_json(view)},
          {"groups", groups},
          {"notes", view.signals.notes}};
}

}  // namespace trireme::cli
