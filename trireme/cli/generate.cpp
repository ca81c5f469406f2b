#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>

#include "trireme/cli/child.h"
#include "trireme/cli/front.h"
#include "trireme/cli/weights.h"

namespace trireme::cli {
namespace {

constexpr int64_t kMostTokens = 1'000'000;

struct GenerateRun {
  GenerateOptions generate;
  bool json = false;
};

void check(const GenerateOptions& options) {
  if (options.max_tokens < 1 || options.max_tokens > kMostTokens) {
    throw ConfigError("[cli.generate] --max-tokens is {}, but must be from 1 to {}", options.max_tokens,
                      kMostTokens);
  }
  if (!std::isfinite(options.temperature) || options.temperature < 0.0) {
    throw ConfigError("[cli.generate] --temperature is {}, but must be 0 (greedy) or more",
                      options.temperature);
  }
  if (options.top_k < 0) {
    throw ConfigError("[cli.generate] --top-k is {}, but must be 0 (all tokens) or more", options.top_k);
  }
}

int generate(const GenerateRun& options, const Front& front) {
  check(options.generate);
  Request request{.verb = "generate",
                  .config = "",
                  .run_dir = "",
                  .runs_root = front.runs_root(),
                  .command = front.command,
                  .json = options.json,
                  .quiet = false,
                  .generate = options.generate};
  const RunWeights found = find_run_weights(options.generate.run, front.runs_root(), why_no_text);
  request.run_dir = found.run.path();
  request.generate.run = found.run.path();
  request.generate.weights = found.path;
  exec_worker(front.environment, request);
}

}  // namespace

void add_generate(CLI::App& app, Front& front) {
  auto options = std::make_shared<GenerateRun>();
  GenerateOptions& generate_options = options->generate;
  CLI::App* verb = app.add_subcommand("generate", "Continue a text with the weights of a run");
  verb->add_option("RUN", generate_options.run, "Run directory, name of a run, or 'latest'")
      ->required()
      ->option_text(" ");
  CLI::Option* const prompt =
      verb->add_option("--prompt", generate_options.prompt, "Text to continue")->option_text("TEXT");
  verb->add_option("--chat", generate_options.chat,
                   "Question to answer, as the chat template of the run writes it")
      ->option_text("TEXT")
      ->excludes(prompt);
  verb->add_option("--max-tokens", generate_options.max_tokens, "Tokens to generate (default: 256)")
      ->option_text("N");
  verb->add_option("--temperature", generate_options.temperature,
                   "Sampling temperature; 0: greedy (default: 0.8)")
      ->option_text("T");
  verb->add_option("--top-k", generate_options.top_k,
                   "Sample from the K most likely tokens; 0: all (default)")
      ->option_text("K");
  verb->add_option("--seed", generate_options.seed, "Seed of the sampling (default: 42)")->option_text("S");
  add_run_dir(*verb, front);
  verb->add_flag("--json", options->json, "Print one JSON document");
  verb->callback(
      [options, &front] { front.action = [options, &front] { return generate(*options, front); }; });
}

}  // namespace trireme::cli
