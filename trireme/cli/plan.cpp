#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

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

std::vector<plan::Policy> chosen(const PolicyOptions& options) {
  if (!options.name.empty()) return {plan::find_policy(options.name)};
  return {plan::policies().begin(), plan::policies().end()};
}

void print_json(const std::vector<plan::Policy>& rows) {
  Json policies = Json::array();
  for (const plan::Policy& row : rows) {
    policies.push_back({{"name", row.name},
                        {"shard_optimizer", row.shard_optimizer},
                        {"shard_gradients", row.shard_gradients},
                        {"shard_parameters", row.shard_parameters},
                        {"reshard_after_forward", row.reshard_after_forward},
                        {"summary", row.summary}});
  }
  fmt::print("{}\n", Json{{"schema", "trireme.policies/1"}, {"policies", policies}}.dump(2));
}

void print_table(const std::vector<plan::Policy>& rows) {
  const auto word = [](bool sharded) { return std::string(sharded ? "sharded" : "whole"); };
  report::Table table(
      {{"policy"}, {"optimizer"}, {"gradients"}, {"parameters"}, {"after forward"}, {"summary"}});
  for (const plan::Policy& row : rows) {
    table.add_row({std::string(row.name), word(row.shard_optimizer), word(row.shard_gradients),
                   word(row.shard_parameters), row.reshard_after_forward ? "freed" : "kept",
                   std::string(row.summary)});
  }
  fmt::print("{}", table.to_string());
}

}  // namespace

void add_plan(CLI::App& app, Front& front) {
  auto options = std::make_shared<PolicyOptions>();
  CLI::App* verb = app.add_subcommand("plan", "Show what strategies do, without starting anything");
  verb->require_subcommand(1);
  CLI::App* policy = verb->add_subcommand("policy", "What each data-parallel policy shards and frees");
  policy->add_option("NAME", options->name, "Only this row")->option_text(" ");
  policy->add_flag("--json", options->json, "One JSON document");
  policy->callback([options, &front] {
    front.action = [options] {
      const auto rows = chosen(*options);
      options->json ? print_json(rows) : print_table(rows);
      return 0;
    };
  });
}

}  // namespace trireme::cli
