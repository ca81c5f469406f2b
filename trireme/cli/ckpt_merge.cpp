// trireme ckpt merge: a run of the weights that adapters make of their base. Tensors are streamed: what is
// held is a layer.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/checkpoint/merged_source.h"
#include "trireme/cli/adapters.h"
#include "trireme/cli/ckpt.h"
#include "trireme/cli/data_path.h"
#include "trireme/cli/front.h"
#include "trireme/cli/weights.h"
#include "trireme/cli/weights_run.h"
#include "trireme/plan/adapter.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

struct MergeOptions {
  std::string adapter, base, name;
  bool any_base = false;
  bool json = false;
};

/// The dtype that safetensors has for a word of precision.compute; empty: none.
std::string dtype_in_files(const std::string& word) {
  if (word == plan::name(plan::Dtype::kFp32)) return "F32";
  if (word == plan::name(plan::Dtype::kBf16)) return "BF16";
  return word == plan::name(plan::Dtype::kFp16) ? "F16" : "";
}

/// Throws where the adapters note the digest of another base, unless `any_base` lets them be added to it.
void check_base(const FoundAdapters& adapters, const checkpoint::Source& base,
                const checkpoint::AdapterTensors& tensors, bool any_base) {
  const std::string word = adapters.digest.substr(0, adapters.digest.find(' ')), dtype = dtype_in_files(word);
  if (dtype.empty()) return;
  const plan::ModelConfig& model = adapters.config.model;
  const plan::ModelFacts facts = plan::describe(model, adapters.config.data.seq_len);
  const std::string digest = word + " " + checkpoint::digest_of_frozen(base, facts, dtype);
  if (digest == adapters.digest) return;
  if (!any_base)
    throw ConfigError(
        "[cli.ckpt] the adapters in {} were trained on weights with digest {}, but {} has {}; name those "
        "weights "
        "with --base. --any-base adds the adapters all the same, as to the weights that a base in 4 bits was "
        "made of",
        adapters.path, adapters.digest, base.path(), digest);
  if (tensors.lengths_are_changes && model.adapter.kind == plan::AdapterKind::kDora)
    throw ConfigError(
        "[cli.ckpt] {} has what is added to the lengths of the rows of its own base, so it cannot be added "
        "to "
        "another one; let its run come to its end, and name checkpoints/final/adapter, which has the lengths",
        adapters.path);
}

int merge(const MergeOptions& options, const Front& front) {
  const FoundAdapters adapters = find_adapters(options.adapter, options.base, front);
  WeightsRun made{.config = adapters.config};
  made.config.name = checked_name(options.name.empty() ? adapters.config.name + "-merged" : options.name);
  made.config.model = plan::without_adapters(made.config.model);
  made.came_with = came_with(adapters.config.model.weights);
  made.speaks = !made.came_with.empty() && why_no_tokenizer(made.came_with, made.config.model).empty() &&
                adapters.config.data.tokenizer == made.came_with;
  auto base = checkpoint::open_source(adapters.config.model.weights);
  checkpoint::AdapterTensors tensors = adapters.open();
  check_base(adapters, *base, tensors, options.any_base);
  const auto merged = checkpoint::merge_adapters(std::move(base), std::move(tensors), adapters.config.model);
  const report::RunDirectory run = make_weights_run(made, *merged, front);
  const std::string path = report::as_typed(run.path());
  if (options.json) {
    fmt::print("{}\n", Json{{"schema", "trireme.ckpt.merge/1"},
                            {"adapter", adapters.path},
                            {"base", adapters.config.model.weights},
                            {"run", run.path()},
                            {"config", run.file("config.yaml")}}
                           .dump(2));
  } else {
    log_info("added {} to {}", adapters.path, adapters.config.model.weights);
    fmt::print("{}\n", path);
  }
  return 0;
}

}  // namespace

void add_merge(CLI::App& ckpt, Front& front) {
  auto options = std::make_shared<MergeOptions>();
  CLI::App* verb =
      ckpt.add_subcommand("merge", "Make a run of weights with adapters (LoRA, DoRA) added to them");
  add_run_dir(*verb, front);
  verb->add_option("ADAPTER", options->adapter,
                   "Run that trained adapters, one of its checkpoints, or a folder of PEFT")
      ->required()
      ->option_text(" ");
  verb->add_option("--base", options->base,
                   "Run, Hugging Face folder or file to add them to (default: what they were trained on)")
      ->option_text("WEIGHTS");
  verb->add_option("--name", options->name, "Name of the new run (default: that of the old one and -merged)")
      ->option_text("NAME");
  verb->add_flag("--any-base", options->any_base,
                 "Add them also to weights with another digest than the adapters note");
  verb->add_flag("--json", options->json, "Print one JSON document");
  verb->callback([options, &front] { front.action = [options, &front] { return merge(*options, front); }; });
}

}  // namespace trireme::cli
