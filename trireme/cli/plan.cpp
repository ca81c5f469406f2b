#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/terminal.h"
#include "trireme/cli/front.h"
#include "trireme/plan/policy.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

struct PolicyOptions {
  std::string name;
  bool json = false;
};

/// Every row of that name or label.
std::vector<plan::Policy> chosen(const PolicyOptions& options) {
  std::vector<plan::Policy> rows;
  for (const plan::Policy& policy : plan::policies()) {
    if (options.name.empty() || options.name == plan::name(policy.name) || options.name == policy.label())
      rows.push_back(policy);
  }
  if (rows.empty()) plan::find_policy(options.name);  // says what there is
  return rows;
}

std::string after_forward(const plan::Policy& policy) {
  return policy.shard_parameters && policy.reshard_after_forward == plan::Policy::kSameRanks ? "freed"
                                                                                             : "kept";
}

void print_json(const std::vector<plan::Policy>& rows) {
  Json policies = Json::array();
  for (const plan::Policy& row : rows) {
    policies.push_back({{"label", row.label()},
                        {"name", plan::name(row.name)},
                        {"sharding", row.sharding == plan::Sharding::kAuto ? "" : plan::name(row.sharding)},
                        {"shard_optimizer", row.shard_optimizer},
                        {"shard_gradients", row.shard_gradients},
                        {"shard_parameters", row.shard_parameters},
                        {"reshard_after_forward", row.reshard_after_forward == plan::Policy::kSameRanks},
                        {"hybrid", row.hybrid},
                        {"summary", row.summary}});
  }
  fmt::print("{}\n", Json{{"schema", "trireme.policies/1"}, {"policies", policies}}.dump(2));
}

void print_table(const std::vector<plan::Policy>& rows) {
  const auto word = [](bool sharded) { return std::string(sharded ? "sharded" : "whole"); };
  report::Table table(
      {{"policy"}, {"optimizer"}, {"gradients"}, {"parameters"}, {"after forward"}, {"over"}, {"summary"}});
  for (const plan::Policy& row : rows) {
    table.add_row({row.label(), word(row.shard_optimizer), word(row.shard_gradients),
                   word(row.shard_parameters), after_forward(row), row.hybrid ? "dp_shard" : "all",
                   std::string(row.summary)});
  }
  fmt::print("{}", table.to_string(terminal_columns(STDOUT_FILENO)));
}

}  // namespace

void add_plan(CLI::App& app, Front& front) {
  auto options = std::make_shared<PolicyOptions>();
  CLI::App* verb = app.add_subcommand("plan", "Show what a strategy does, without running it");
  verb->require_subcommand(1);
  CLI::App* policy = verb->add_subcommand("policy", "Show what each data-parallel policy shards and frees");
  policy->add_option("NAME", options->name, "Show only this policy")->option_text(" ");
  policy->add_flag("--json", options->json, "Print one JSON document");
  policy->callback([options, &front] {
    front.action = [options] {
      const auto rows = chosen(*options);
      options->json ? print_json(rows) : print_table(rows);
      return 0;
    };
  });
  add_plan_step(*verb, front);
  add_plan_time(*verb, front);
  add_plan_mesh(*verb, front);
  add_plan_placements(*verb, front);
  add_plan_signals(*verb, front);
}

}  // namespace trireme::cli
