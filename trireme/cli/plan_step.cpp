#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "trireme/base/file.h"
#include "trireme/base/terminal.h"
#include "trireme/cli/front.h"
#include "trireme/cli/step_view.h"
#include "trireme/cli/train_job.h"

namespace trireme::cli {
namespace {

struct StepOptions {
  TrainJob job;
  std::string gpu, file;
  std::optional<int64_t> rank;
  bool text = false, all_ranks = false, json = false, all = false;
};

PreparedJob prepared_for(const StepOptions& options, const Front& front) {
  TrainJob job = options.job;
  job.overrides = front.overrides;
  PreparedJob prepared = plan_train_job(job, front, options.gpu);
  say_notes(prepared.config);
  return prepared;
}

StepView view_for(const StepOptions& options, const Front& front) {
  if (options.file.empty()) {
    const PreparedJob prepared = prepared_for(options, front);
    return planned_step(prepared.plan, options.rank);
  }
  if (!front.overrides.empty()) {
    throw UsageError(
        fmt::format("[cli.plan] --check reads a program, on which {} has no effect", front.overrides.front()),
        "remove one of them");
  }
  if (!std::filesystem::exists(options.file)) {
    throw ConfigError("[cli.plan] --check {} does not exist; give a file that --text wrote", options.file);
  }
  return step_from_text(read_file(options.file), options.file);
}

int step(const StepOptions& options, const Front& front) {
  if (options.all_ranks) {
    const PreparedJob prepared = prepared_for(options, front);
    fmt::print("{}", planned_texts(prepared.plan));
    return 0;
  }
  const StepView view = view_for(options, front);
  if (options.text) {
    fmt::print("{}", plan::to_text(view.program));
  } else if (options.json) {
    fmt::print("{}\n", to_json(view));
  } else {
    fmt::print("{}", to_text(view, options.all, terminal_columns(STDOUT_FILENO)));
  }
  return 0;
}

}  // namespace

void add_plan_step(CLI::App& plan, Front& front) {
  auto options = std::make_shared<StepOptions>();
  CLI::App* verb = plan.add_subcommand(
      "step", "Show what a rank does in a step: every action, what it sends, and the memory it then holds");
  add_config_file(*verb, options->job.config);
  CLI::Option* const ranks =
      verb->add_option("-n,--ranks", options->job.ranks, "Ranks of the run (default: all GPUs, else 2)")
          ->option_text("RANKS");
  CLI::Option* const gpu = add_planned_gpu(*verb, options->gpu);
  CLI::Option* const rank =
      verb->add_option("--rank", options->rank,
                       "Show this rank of a pipeline (default: the first), and its elements of each unit")
          ->option_text("R");
  CLI::Option* const text = verb->add_flag(
      "--text", options->text, "Print the program with exact numbers, in the form that --check reads");
  verb->add_flag(
          "--all-ranks", options->all_ranks,
          "With --text, print the programs of all ranks of a pipeline, as train.step_program takes them")
      ->needs(text)
      ->excludes(rank);
  verb->add_flag("--json", options->json, "Print one JSON document")->excludes(text);
  verb->add_flag("--all", options->all, "Print a line for every action, without folding repetitions");
  verb->add_option("--check", options->file,
                   "Check a program that --text wrote and you edited: exit code 2 if a line cannot be read, "
                   "1 if an action is not valid")
      ->option_text("FILE")
      ->excludes(ranks)
      ->excludes(rank)
      ->excludes(gpu)
      ->excludes("CONFIG")
      ->excludes("--config");
  verb->footer(
      "Any config key can be given as --section.key=value.\n"
      "Examples:\n"
      "  trireme plan step -n 2 --model.preset=gpt-tiny --parallel.policy=fsdp\n"
      "  trireme plan step configs/quickstart.yaml --text > mine.txt\n"
      "  trireme plan step configs/pipeline.yaml --rank 1\n"
      "  trireme plan step configs/llama-1b.yaml -n 8 --gpu h100\n"
      "  trireme plan step --check mine.txt");
  verb->callback([options, &front] { front.action = [options, &front] { return step(*options, front); }; });
}

}  // namespace trireme::cli
