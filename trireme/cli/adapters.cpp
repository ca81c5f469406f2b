#include "trireme/cli/adapters.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/fit.h"
#include "trireme/checkpoint/store.h"
#include "trireme/checkpoint/strict_json.h"
#include "trireme/cli/data_path.h"
#include "trireme/cli/runs.h"
#include "trireme/cli/weights.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/peft.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kFinalAdapter = "checkpoints/final/adapter";
constexpr const char* kBaseNote = "note.base";  // in the metadata of a file of adapters

bool is_peft(const std::string& folder) {
  std::error_code error;
  return fs::exists(folder + "/" + plan::kPeftConfig, error);
}

plan::Config config_of(const std::string& yaml) {
  return plan::load({.path = "", .text = yaml, .overrides = {}}, Environment()).config;
}

plan::Config config_of_run(const std::string& run) {
  return config_of(read_file(run + "/config.yaml"));
}

std::optional<std::string> newest_checkpoint_of(const report::RunDirectory& run) {
  const std::string folder = run.file("checkpoints");
  if (!checkpoint::has_checkpoint(folder)) return std::nullopt;
  const checkpoint::Newest newest = checkpoint::newest_checkpoint(checkpoint::Folder(folder));
  for (const std::string& reason : newest.passed_over) log_warning("skipped {}", reason);
  return newest.checkpoint ? std::optional(newest.checkpoint->path()) : std::nullopt;
}

/// Those that the run's last attempt has left, else its newest checkpoint, else what an earlier one left;
/// empty: none.
std::string adapters_of_run(const report::RunDirectory& run) {
  if (!trains_adapters(run)) return {};
  const std::string left = run.file(kFinalAdapter);
  if (run.has_finished() && is_peft(left)) return left;
  return newest_checkpoint_of(run).value_or(is_peft(left) ? left : std::string());
}

plan::Config config_of_hugging_face(const std::string& folder) {
  plan::Config config;
  config.model = model_of_folder(folder);
  config.data.seq_len = std::min(config.model.max_seq_len, kUsualLength);
  if (why_no_tokenizer(folder, config.model).empty())
    config.data.tokenizer = fs::absolute(folder).lexically_normal().string();
  return config;
}

/// The config of a model that nothing but its weights is known of: that of their run, if they have one.
plan::Config config_of_base(const std::string& base, const Front& front) {
  if (is_hugging_face(base)) return config_of_hugging_face(base);
  std::error_code error;
  std::string run = fs::exists(base, error) ? run_around(fs::canonical(base)) : std::string();
  if (run.empty() && fs::is_regular_file(base, error))
    throw ConfigError(
        "[cli.adapters] {} does not say which model it is of; give --base a run, a checkpoint or a folder of "
        "Hugging Face",
        base);
  plan::Config config;
  if (run.empty()) {
    const FoundWeights found = find_weights(base, "", front);
    run = run_around(found.path);
    config.model = found.model;
  }
  if (!run.empty()) config = config_of_run(run);
  config.model = complete_model(config);
  return config;
}

/// The weights that a folder of PEFT says it belongs to, if they are there.
std::string base_in(const nlohmann::json& peft) {
  const auto found = peft.find("base_model_name_or_path");
  if (found == peft.end() || !found->is_string()) return {};
  const auto path = found->get<std::string>();
  std::error_code error;
  return fs::exists(path, error) ? path : std::string();
}

[[noreturn]] void refuse_without_base(const std::string& path) {
  throw ConfigError(
      "[cli.adapters] nothing says which weights the adapters in {} belong to, or they are not there; name "
      "them "
      "with --base WEIGHTS",
      path);
}

/// A folder that no run has around it.
plan::Config config_of_folder(const std::string& folder, const std::string& base, const Front& front) {
  const std::string file = folder + "/" + plan::kPeftConfig;
  const nlohmann::json peft = checkpoint::parse_json(read_file(file), file, checkpoint::kFetchAgain);
  const std::vector<std::string> keys = plan::keys_of_peft(peft, file);
  const std::string named = base.empty() ? base_in(peft) : base;
  if (named.empty()) refuse_without_base(folder);
  plan::Config config = config_of_base(named, front);
  config.model.weights = named;
  plan::Config adapted =
      plan::load({.path = "", .text = plan::to_yaml({config, {}}), .overrides = keys}, Environment()).config;
  const fs::path path = fs::weakly_canonical(fs::absolute(folder));
  adapted.name = path.has_filename() ? path.filename().string() : path.parent_path().filename().string();
  return adapted;
}

/// model.weights as a path, and what it stands for checked.
void settle_base(FoundAdapters& found, const std::string& base, const Front& front) {
  plan::Config& config = found.config;
  if (!base.empty()) config.model.weights = base;
  if (config.model.weights.empty())
    throw ConfigError(
        "[cli.adapters] the adapters in {} were trained on the random weights of seed={}; the end of their "
        "run "
        "leaves these with the adapters added, in checkpoints/final/model.safetensors. --base WEIGHTS names "
        "others",
        found.path, config.seed);
  config.model.adapter.weights = found.is_peft ? found.path : "";
  settle_weights_path(config, front.runs_root());
  check_weights(std::nullopt, config);
}

std::string noted_digest(const FoundAdapters& found) {
  if (found.is_peft) {
    const auto source = checkpoint::open_source(found.path + "/" + plan::kPeftWeights);
    const auto note = source->metadata().find(kBaseNote);
    return note == source->metadata().end() ? "" : note->second;
  }
  const checkpoint::Checkpoint saved(found.path);
  return checkpoint::text_of(
      checkpoint::value_of(checkpoint::parse_json(saved.state(), found.path), "run", found.path), "base",
      found.path);
}

FoundAdapters adapters_of_checkpoint(const std::string& path) {
  const checkpoint::Checkpoint saved(path);
  const nlohmann::json state = checkpoint::parse_json(saved.state(), path);
  const auto run = state.find("run");
  FoundAdapters found{.path = path, .config = {}, .digest = {}};
  if (run != state.end() && run->is_object() && run->contains("config"))
    found.config = config_of(checkpoint::text_of(*run, "config", path));
  if (!plan::has_adapters(found.config))
    throw ConfigError(
        "[cli.adapters] {} holds no adapters but whole weights, to which there is nothing to add; 'trireme "
        "ckpt "
        "export-hf' takes them as they are",
        path);
  return found;
}

FoundAdapters adapters_of_folder(const std::string& folder, const std::string& base, const Front& front) {
  const std::string run = run_around(fs::weakly_canonical(fs::absolute(folder)));
  return {.path = fs::absolute(folder).lexically_normal().string(),
          .config = run.empty() ? config_of_folder(folder, base, front) : config_of_run(run),
          .digest = {},
          .is_peft = true};
}

FoundAdapters find_run_adapters(const std::string& word, const std::string& base, const Front& front) {
  std::error_code error;
  if (fs::exists(word, error) && !fs::exists(fs::path(word) / "manifest.json", error))
    throw ConfigError(
        "[cli.adapters] {} holds no adapters: it has no {}, and is neither a checkpoint nor a run; give one "
        "of "
        "these",
        word, plan::kPeftConfig);
  std::string path;
  find_run(word, front.runs_root(),
           {.what = "adapters",
            .file = std::string(kFinalAdapter) + " or a checkpoint of adapters",
            .is_there = [&path](const report::RunDirectory& run) {
              path = adapters_of_run(run);
              return !path.empty();
            }});
  return is_peft(path) ? adapters_of_folder(path, base, front) : adapters_of_checkpoint(path);
}

}  // namespace

checkpoint::AdapterTensors FoundAdapters::open() const {
  const std::string prefix = is_peft ? plan::kPeftPrefix : "";
  auto source = checkpoint::open_source(is_peft ? path + "/" + plan::kPeftWeights : path);
  checkpoint::check_fit(*source, plan::adapter_facts(config.model, config.data.seq_len, prefix));
  return {.source = std::move(source), .prefix = prefix, .lengths_are_changes = !is_peft};
}

FoundAdapters find_adapters(const std::string& word, const std::string& base, const Front& front) {
  FoundAdapters found = is_peft(word)                     ? adapters_of_folder(word, base, front)
                        : checkpoint::is_checkpoint(word) ? adapters_of_checkpoint(fs::weakly_canonical(word))
                                                          : find_run_adapters(word, base, front);
  settle_base(found, base, front);
  found.digest = noted_digest(found);
  return found;
}

}  // namespace trireme::cli
