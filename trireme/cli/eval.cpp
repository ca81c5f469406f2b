#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>

#include "trireme/base/build_info.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/fit.h"
#include "trireme/checkpoint/store.h"
#include "trireme/cli/corpus_text.h"
#include "trireme/cli/data_path.h"
#include "trireme/cli/front.h"
#include "trireme/cli/gpu_count.h"
#include "trireme/cli/kept_files.h"
#include "trireme/cli/questions.h"
#include "trireme/cli/run_plan.h"
#include "trireme/cli/train_job.h"
#include "trireme/cli/weights.h"
#include "trireme/data/tokenizer.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/model_family.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

struct EvalArguments {
  std::string model, data, choices;
  std::optional<int64_t> ranks, window;
  bool per_document = false, json = false;
};

/// The weights that are evaluated, and a config that fits them.
struct Evaluated {
  std::string run;  ///< empty: the weights are no run's
  std::string weights;
  plan::Config config;
};

plan::Config config_of(const report::RunDirectory& run) {
  const plan::Config config =
      plan::load({.path = run.file("config.yaml"), .text = "", .overrides = {}}, Environment()).config;
  if (plan::reads_images(config.model.family)) {
    throw ConfigError("[cli.eval] {} trained an image model ({}), which reads no text; choose a run on text",
                      run.path(), config.model.family);
  }
  check_tokenizer(run, config);
  return config;
}

Evaluated of_run_with(const report::RunDirectory& run, const std::string& weights) {
  return {run.path(), weights, config_of(run)};
}

/// A checkpoint knows its run by where it lies.
Evaluated of_run_at(const std::string& word) {
  const fs::path path = fs::canonical(word);
  const fs::path run = path.parent_path().parent_path();
  if (!fs::exists(run / "manifest.json")) {
    throw ConfigError(
        "[cli.eval] {} lies in no run, so that its tokenizer is not known; name a run, or a checkpoint that "
        "lies in one",
        word);
  }
  Evaluated evaluated = of_run_with(report::RunDirectory::open(run), path);
  refuse_adapters_alone(path, evaluated.config);
  return evaluated;
}

Evaluated of_model(const std::string& folder, const Front& front) {
  Evaluated evaluated{.run = "", .weights = fs::canonical(folder), .config = {}};
  plan::Config& config = evaluated.config;
  config.model = find_weights(folder, "", front).model;
  config.data.seq_len = std::min(config.model.max_seq_len, kUsualLength);
  if (const std::string why = why_no_tokenizer(evaluated.weights, config.model); !why.empty())
    throw ConfigError("[cli.eval] {} has no tokenizer for its model: {}", folder, why);
  config.data.tokenizer = evaluated.weights;
  checkpoint::check_fit(*checkpoint::open_source(evaluated.weights),
                        plan::describe(config.model, config.data.seq_len));
  return evaluated;
}

Evaluated find_evaluated(const std::string& word, const Front& front) {
  if (checkpoint::is_checkpoint(word)) return of_run_at(word);
  if (is_hugging_face(word)) return of_model(word, front);
  const RunWeights found = find_run_weights(word, front.runs_root(), why_no_text);
  return of_run_with(found.run, found.path);
}

/// A run was trained with its own length, whatever its model says.
int64_t window_of(const EvalArguments& options, const plan::Config& config) {
  const int64_t window = options.window.value_or(config.data.seq_len);
  const int64_t most = std::max(config.model.max_seq_len, config.data.seq_len);
  if (window >= 1 && window <= most) return window;
  throw ConfigError("[cli.eval] --window is {}, but the model takes from 1 to {} tokens", window, most);
}

/// A tokenizer that makes tokens which the model has not would read beside its tables.
void check_vocabulary(const plan::Config& config) {
  const int64_t tokens = data::make_tokenizer(config.data.tokenizer)->vocab_size();
  if (tokens <= config.model.vocab_size) return;
  throw ConfigError("[cli.eval] data.tokenizer={} makes {} tokens, but the model has {} (model.vocab_size)",
                    config.data.tokenizer, tokens, config.model.vocab_size);
}

/// Refuses what cannot be read, and makes paths absolute.
std::string checked_data(const EvalArguments& options, plan::Config& config) {
  if (options.data.empty() == options.choices.empty()) {
    throw UsageError("[cli.eval] one of --data and --choices is needed",
                     "give a text with --data PATH, or questions with --choices FILE.jsonl");
  }
  if (!options.choices.empty()) {
    read_questions(options.choices);
    return fs::canonical(options.choices);
  }
  config.data.path = options.data;
  config.data.mixture = {};
  settle_data_path(config, "");
  source_of(config.data.path);
  return config.data.path;
}

int evaluate(const EvalArguments& options, Front& front) {
  Evaluated evaluated = find_evaluated(options.model, front);
  const std::string data = checked_data(options, evaluated.config);
  check_vocabulary(evaluated.config);
  const bool cpu = evaluated.config.device == plan::Device::kCpu;
  const int gpus = cpu || !kHasCuda ? 0 : gpu_count();
  const plan::Device device = choose_device(cpu ? plan::Device::kCpu : plan::Device::kAuto, gpus);
  Request request{.verb = "eval",
                  .config = plan::to_yaml({evaluated.config, {}}),
                  .run_dir = "",
                  .command = front.command,
                  .json = options.json,
                  .eval = {.device = std::string(plan::name(device)),
                           .run = evaluated.run,
                           .weights = evaluated.weights,
                           .data = data,
                           .questions = !options.choices.empty(),
                           .per_document = options.per_document,
                           .window = window_of(options, evaluated.config)}};
  return run_workers(request, front.environment, device, choose_ranks(options.ranks, device, gpus));
}

}  // namespace

void add_eval(CLI::App& app, Front& front) {
  auto options = std::make_shared<EvalArguments>();
  CLI::App* verb = app.add_subcommand(
      "eval", "Measure loss, perplexity and bits a byte on a text, or accuracy on questions");
  verb->add_option("RUN", options->model,
                   "Run directory, name of a run, 'latest', a checkpoint of a run, or a Hugging Face folder")
      ->required()
      ->option_text(" ");
  verb->add_option("--data", options->data,
                   "A text file, JSON Lines (FILE.jsonl#FIELD), a folder of them, or 'builtin'")
      ->option_text("PATH");
  verb->add_option("--choices", options->choices,
                   R"(Questions: lines of {"prompt": "...", "choices": ["...", "..."], "answer": 0})")
      ->option_text("FILE");
  verb->add_option("-n,--ranks", options->ranks, "Ranks to start here (default: all GPUs, else 2)")
      ->option_text("RANKS");
  verb->add_option("--window", options->window,
                   "Most tokens that one token is predicted from (default: data.seq_len of the run)")
      ->option_text("TOKENS");
  verb->add_flag("--per-document", options->per_document, "Show a row for each document or question");
  add_run_dir(*verb, front);
  verb->add_flag("--json", options->json, "Print one JSON document");
  verb->footer(
      "Each token of a document is predicted once, in windows that follow each other; the first one from\n"
      "the token that separates documents.\n"
      "Examples:\n"
      "  trireme eval latest --data held_out.txt\n"
      "  trireme eval models/gpt2 --data pages.jsonl#body --per-document\n"
      "  trireme eval latest --choices hellaswag.jsonl");
  verb->callback(
      [options, &front] { front.action = [options, &front] { return evaluate(*options, front); }; });
}

}  // namespace trireme::cli
