// trireme bench list-targets: what can be measured by name.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/terminal.h"
#include "trireme/base/text.h"
#include "trireme/bench/target.h"
#include "trireme/cli/front.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

struct ListOptions {
  std::string chapter;
  bool json = false;
};

std::vector<const bench::Target*> listed(const ListOptions& options) {
  std::vector<const bench::Target*> targets;
  if (options.chapter.empty()) {
    for (const bench::Target& target : bench::all_targets()) targets.push_back(&target);
    return targets;
  }
  for (const bench::Choice& choice : bench::targets_of_chapter(options.chapter))
    targets.push_back(choice.target);
  return targets;
}

std::string ranks_text(const bench::Target& target) {
  std::vector<std::string> counts;
  for (const int64_t count : target.ranks) counts.push_back(std::to_string(count));
  return join(counts, ", ") + (target.needs_gpu ? " on GPUs" : "");
}

Json to_json(const bench::Comparison& comparison) {
  if (comparison.arms.empty()) return {};
  Json arms = Json::array();
  for (const bench::Arm& arm : comparison.arms) {
    arms.push_back({{"name", arm.name},
                    {"keys", arm.keys},
                    {"owes", bench::owed_text(arm)},
                    {"ranks", arm.ranks > 0 ? Json(arm.ranks) : Json()},
                    {"needs_gpu", arm.needs_gpu}});
  }
  return {{"difference", comparison.difference}, {"expected", comparison.expected}, {"arms", arms}};
}

Json to_json(const bench::Target& target) {
  return {{"name", bench::full_name(target)},
          {"chapters", target.chapters},
          {"aliases", target.aliases},
          {"summary", target.summary},
          {"ranks", target.ranks},
          {"needs_gpu", target.needs_gpu},
          {"workload", {{"all", target.workload}, {"cpu", target.on_cpu}, {"cuda", target.on_gpu}}},
          {"declared", to_json(target.declared)},
          {"documents", to_json(target.documents)}};
}

int list_targets(const ListOptions& options) {
  Json rows = Json::array();
  report::Table table({{"target"}, {"chapter"}, {"ranks"}, {"varies"}, {"what it compares"}});
  for (const bench::Target* target : listed(options)) {
    rows.push_back(to_json(*target));
    table.add_row({bench::full_name(*target), target->chapters.front(), ranks_text(*target),
                   target->declared.difference, target->summary});
  }
  if (options.json) {
    fmt::print("{}\n", Json{{"schema", "trireme.bench_targets/1"}, {"targets", rows}}.dump(2));
  } else {
    fmt::print("{}", table.to_string(terminal_columns(STDOUT_FILENO)));
  }
  return 0;
}

}  // namespace

void add_bench_targets(CLI::App& bench, Front& front) {
  auto options = std::make_shared<ListOptions>();
  CLI::App* verb = bench.add_subcommand("list-targets", "List what can be measured by name");
  verb->add_option("-c,--chapter", options->chapter, "Only targets of this chapter")->option_text("NAME");
  verb->add_flag("--json", options->json, "Print one JSON document, with the keys of every arm");
  verb->footer(
      "A target is one workload, and two or more ways to train it of which the first is the reference.\n"
      "Its other names are in the JSON document.\n"
      "Example:\n"
      "  trireme bench list-targets --chapter labs/train_distributed");
  verb->callback([options, &front] { front.action = [options] { return list_targets(*options); }; });
}

}  // namespace trireme::cli
