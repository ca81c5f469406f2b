#include "trireme/cli/weights.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/fit.h"
#include "trireme/checkpoint/model_folder.h"
#include "trireme/checkpoint/store.h"
#include "trireme/checkpoint/strict_json.h"
#include "trireme/cli/runs.h"
#include "trireme/plan/adapter.h"
#include "trireme/plan/hugging_face.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/peft.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "manifest.json";  // of a run
constexpr const char* kFinal = "checkpoints/final/model.safetensors";

bool is_there(const std::string& path) {
  std::error_code error;
  return fs::exists(path, error);
}

}  // namespace

plan::ModelConfig model_of_folder(const std::string& path) {
  return plan::from_hugging_face(checkpoint::read_model_config(path),
                                 path + "/" + checkpoint::kModelConfigName);
}

plan::ModelConfig complete_model(const plan::Config& config) {
  return plan::complete(plan::without_adapters(config.model), config.data.seq_len);
}

namespace {

/// Keys that are of no consequence for weights take the values of `other`.
plan::ModelConfig alike_in_the_rest(plan::ModelConfig model, const plan::ModelConfig& other) {
  model.preset = other.preset;
  model.weights = other.weights;
  model.adapter = other.adapter;
  model.dropout = other.dropout;
  const bool llama = model.family == plan::ModelFamily::kLlama;
  if (llama) model.max_seq_len = other.max_seq_len;
  if (!llama) model.rope_theta = other.rope_theta;
  if (model.rope_scaling == plan::RopeScaling::kNone) {
    model.rope_factor = other.rope_factor;
    model.rope_low_freq_factor = other.rope_low_freq_factor;
    model.rope_high_freq_factor = other.rope_high_freq_factor;
    model.rope_original_len = other.rope_original_len;
  }
  return model;
}

/// Weights with other norms or frequencies than they were trained with fit, and are of no use.
void check_same_model(const plan::Config& config) {
  plan::Config theirs = config;
  theirs.model = alike_in_the_rest(model_of_folder(config.model.weights), config.model);
  std::vector<std::string> keys;
  for (const std::string& key : plan::differing_keys(theirs, config)) keys.push_back(key);
  if (keys.empty()) return;
  throw ConfigError(
      "[cli.weights] model.weights={} belongs to a model with other values of {}; 'trireme ckpt import-hf "
      "{}' writes a matching config",
      config.model.weights, join(keys, ", "), config.model.weights);
}

/// For weights that do not name their model: if they do not fit, the config is wrong, not the file.
void check_fit_to(const plan::Config& config, const checkpoint::Source& weights) {
  try {
    checkpoint::check_fit(weights, plan::describe(complete_model(config), config.data.seq_len));
  } catch (const DataError& error) {
    throw ConfigError("{}", error.what());
  }
}

plan::Config load_config(const std::string& path, const std::string& text) {
  return plan::load({.path = path, .text = text, .overrides = {}}, Environment()).config;
}

/// Whether the run was imported: its files of a tokenizer lie in it.
bool find_imported(FoundWeights& found, const std::string& run) {
  const std::string folder = run + "/" + kImported;
  if (is_there(folder)) found.came_with = folder;
  return is_there(folder);
}

/// Follows `weights` from run to run, to where the first of them began.
void find_origin_of(FoundWeights& found, std::string weights) {
  constexpr int kFurthest = 16;
  for (int i = 0; i < kFurthest && !weights.empty(); ++i) {
    for (const std::string& folder : {weights, fs::path(weights).parent_path().string()}) {
      if (!is_hugging_face(folder)) continue;
      found.came_with = folder;
      return;
    }
    if (!is_there(weights)) found.lost = weights;
    const std::string run = run_around(weights);
    if (run.empty() || find_imported(found, run)) return;
    weights = load_config(run + "/config.yaml", "").model.weights;
  }
}

void find_origin(FoundWeights& found, const plan::Config& config, const std::string& run) {
  if (!find_imported(found, run)) find_origin_of(found, config.model.weights);
}

FoundWeights of_checkpoint(const std::string& path) {
  const checkpoint::Checkpoint found(path);
  const auto state = checkpoint::parse_json(found.state(), path);
  const auto run = state.find("run");
  if (run == state.end() || !run->is_object() || !run->contains("config"))
    throw ConfigError("[cli.weights] {} does not record which model it belongs to; add --config CONFIG.yaml",
                      path);
  const plan::Config config = load_config("", checkpoint::text_of(*run, "config", path));
  refuse_adapters_alone(path, config);
  FoundWeights weights{path, complete_model(config)};
  find_origin(weights, config, fs::path(path).parent_path().parent_path());
  return weights;
}

/// Whether the last attempt has written the final weights that are there: its summary says so, and a run that
/// has never gone on needs none.
bool final_weights_count(const report::RunDirectory& run) {
  if (!is_there(run.file(kFinal))) return false;
  const std::string summary = run.file("summary.json");
  if (!is_there(summary)) return !checkpoint::has_checkpoint(run.file("checkpoints"));
  const auto json = nlohmann::json::parse(read_file(summary), nullptr, false);
  return json.is_object() && json.contains("weights") && json["weights"].is_string();
}

FoundWeights of_run(const std::string& word, const Front& front) {
  const auto [run, path] = find_run_weights(word, front.runs_root());
  if (checkpoint::is_checkpoint(path)) return of_checkpoint(path);
  const plan::Config config = load_config(run.file("config.yaml"), "");
  FoundWeights weights{path, complete_model(config)};
  find_origin(weights, config, run.path());
  return weights;
}

}  // namespace

std::string run_around(const fs::path& weights) {
  constexpr int kDeepest = 3;  // RUN/checkpoints/final/model.safetensors
  fs::path folder = weights;
  for (int i = 0; i < kDeepest; ++i) {
    folder = folder.parent_path();
    if (is_there(folder / kManifest) && is_there(folder / "config.yaml")) return folder;
  }
  return {};
}

std::string came_with(const std::string& weights) {
  FoundWeights found;
  find_origin_of(found, weights);
  return found.came_with;
}

bool is_hugging_face(const std::string& path) {
  return checkpoint::is_model_folder(path) && is_there(path + "/" + checkpoint::kModelConfigName);
}

std::string why_no_text(const report::RunDirectory& run) {
  try {
    const plan::Config config =
        plan::load({.path = run.file("config.yaml"), .text = "", .overrides = {}}, Environment()).config;
    return plan::reads_images(config.model.family) ? "its model reads images" : "";
  } catch (const Error&) {
    return "";  // the worker says what is wrong with it
  }
}

namespace {

/// Whether a word that is no path stands for a run, as other commands take it.
bool names_run(const std::string& word, const std::string& root) {
  if (word == "latest") return !report::list_runs(root).empty();
  return is_there(root + "/" + word + "/" + kManifest) || !report::list_runs(root, word).empty();
}

}  // namespace

bool trains_adapters(const report::RunDirectory& run) {
  const std::string config = run.file("config.yaml");
  return is_there(config) && plan::has_adapters(load_config(config, ""));
}

std::string weights_of_run(const report::RunDirectory& run) {
  if (final_weights_count(run)) return run.file(kFinal);
  const std::string folder = run.file("checkpoints");
  if (!is_there(folder) || trains_adapters(run)) return {};
  const checkpoint::Newest newest = checkpoint::newest_checkpoint(checkpoint::Folder(folder));
  for (const std::string& reason : newest.passed_over) log_warning("skipped {}", reason);
  return newest.checkpoint ? newest.checkpoint->path() : std::string();
}

RunWeights find_run_weights(const std::string& word, const std::string& root,
                            std::function<std::string(const report::RunDirectory&)> why_not) {
  std::string path;
  const auto has_weights = [&path](const report::RunDirectory& candidate) {
    path = weights_of_run(candidate);
    return !path.empty();
  };
  report::RunDirectory run = find_run(word, root,
                                      {.what = "weights",
                                       .file = "final weights or a checkpoint",
                                       .is_there = has_weights,
                                       .why_not = std::move(why_not)});
  return {std::move(run), path};
}

void refuse_adapters_alone(const std::string& checkpoint, const plan::Config& config) {
  if (!plan::has_adapters(config)) return;
  throw ConfigError(
      "[cli.weights] {} holds adapters alone, since its run has adapter.kind={}; 'trireme ckpt merge {}' "
      "makes a run of the weights with the adapters added to them",
      checkpoint, config.model.adapter.kind, checkpoint);
}

void settle_weights_path(plan::Config& config, const std::string& root) {
  if (std::string& adapter = config.model.adapter.weights; !adapter.empty())
    adapter = fs::absolute(adapter).lexically_normal().string();
  std::string& path = config.model.weights;
  if (path.empty()) return;
  if (!is_there(path) && names_run(path, root)) {
    path = fs::absolute(find_run_weights(path, root).path).lexically_normal().string();
    return;
  }
  path = fs::absolute(path).lexically_normal().string();
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  if (!is_there(path + "/" + kManifest)) return;
  if (const std::string found = weights_of_run(report::RunDirectory::open(path)); !found.empty())
    path = found;
}

namespace {

/// For a new run that begins with adapters of PEFT.
void check_adapter(const plan::Config& config) {
  const std::string& folder = config.model.adapter.weights;
  if (folder.empty()) return;
  const std::string file = folder + "/" + plan::kPeftConfig, weights = folder + "/" + plan::kPeftWeights;
  if (!is_there(file) || !is_there(weights))
    throw ConfigError(
        "[cli.weights] adapter.weights={} has no {} beside {}; set it to a folder that PEFT, or a run with "
        "adapters, has saved (checkpoints/final/adapter)",
        folder, plan::kPeftConfig, plan::kPeftWeights);
  plan::check_peft(checkpoint::parse_json(read_file(file), file), config.model, file);
  try {
    checkpoint::check_fit(*checkpoint::open_source(weights),
                          plan::adapter_facts(config.model, config.data.seq_len));
  } catch (const DataError& error) {
    throw ConfigError("{}; adapter.targets={} names the layers", error.what(), config.model.adapter.targets);
  }
}

}  // namespace

void check_weights(const std::optional<ResumePoint>& resume, const plan::Config& config) {
  const bool goes_on = resume && !(resume->run_directory.empty() && resume->checkpoint.empty());
  const bool has_saved = goes_on && (!resume->checkpoint.empty() ||
                                     checkpoint::has_checkpoint(resume->run_directory + "/checkpoints"));
  if (!has_saved) check_adapter(config);
  const std::string& path = config.model.weights;
  if (path.empty() || (goes_on && !plan::has_adapters(config))) return;
  if (!is_there(path))
    throw ConfigError(
        "[cli.weights] model.weights={} does not exist; set it to a run, a Hugging Face folder, a checkpoint "
        "or a safetensors file",
        path);
  if (fs::is_directory(path) && !checkpoint::is_checkpoint(path) && !checkpoint::is_model_folder(path)) {
    throw ConfigError(
        "[cli.weights] model.weights={} is {}; set it to a run that has weights, a Hugging Face folder, a "
        "checkpoint or a safetensors file",
        path,
        is_there(path + "/" + kManifest)
            ? "a run with neither final weights of its last attempt nor an intact checkpoint"
            : "a folder without weights");
  }
  const auto source = checkpoint::open_source(path);
  if (!is_hugging_face(path)) return check_fit_to(config, *source);
  check_same_model(config);
  checkpoint::check_fit(*source, plan::describe(complete_model(config), config.data.seq_len));
}

FoundWeights find_weights(const std::string& word, const std::string& config, const Front& front) {
  FoundWeights found;
  if (is_hugging_face(word)) {
    found = {word, config.empty() ? model_of_folder(word) : plan::ModelConfig(), word};
  } else if (!config.empty() && (checkpoint::is_checkpoint(word) || checkpoint::is_model_folder(word) ||
                                 fs::is_regular_file(word))) {
    found.path = word;
  } else if (checkpoint::is_checkpoint(word)) {
    found = of_checkpoint(fs::weakly_canonical(word));
  } else if (fs::is_regular_file(word) || checkpoint::is_model_folder(word)) {
    throw ConfigError("[cli.weights] {} does not record which model it belongs to; add --config CONFIG.yaml",
                      word);
  } else {
    found = of_run(word, front);
  }
  if (!config.empty()) found.model = complete_model(load_config(config, ""));
  return found;
}

}  // namespace trireme::cli
