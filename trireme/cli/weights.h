#pragma once
// Weights that a run begins with, or that leave one: what `model.weights` and `trireme ckpt export-hf` name.
#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "trireme/cli/front.h"
#include "trireme/cli/train_job.h"
#include "trireme/plan/config.h"
#include "trireme/report/run_dir.h"

namespace trireme::cli {

/// The folder of an imported run with the files that came with its weights.
inline constexpr const char* kImported = "hugging_face";

/// The sequence length of a model that came without one: it can be expected to fit in memory.
inline constexpr int64_t kUsualLength = 1024;

/// Makes model.weights a path from the root, so that it means the same elsewhere. A run, named by its folder,
/// its name or 'latest' among the runs below `root`, stands for its weights (weights_of_run()), if it has
/// any.
void settle_weights_path(plan::Config& config, const std::string& root);

/// Throws ConfigError when a new run's model.weights is not there or is of another model, DataError when a
/// folder names its model and does not hold the weights of it. A run that goes on does not need them, but
/// for those under adapters.
void check_weights(const std::optional<ResumePoint>& resume, const plan::Config& config);

/// Throws ConfigError where a checkpoint of a run with this config has no weights of a model, but adapters.
void refuse_adapters_alone(const std::string& checkpoint, const plan::Config& config);

/// Whether the checkpoints of a run hold adapters alone.
bool trains_adapters(const report::RunDirectory& run);

/// Where weights are, and what model they are of.
struct FoundWeights {
  std::string path;            ///< for checkpoint::open_source()
  plan::ModelConfig model;     ///< complete
  std::string came_with = {};  ///< a folder with the tokenizer's files; empty: not known
  std::string lost = {};       ///< where that folder should be, if it is gone
};

/// The path of a run's weights: the final ones where its last attempt has written them, else its newest
/// checkpoint that is whole, unless it holds adapters alone; empty: it has neither.
std::string weights_of_run(const report::RunDirectory& run);

/// A run, and the path of its weights.
struct RunWeights {
  report::RunDirectory run;
  std::string path;
};

/// The run below `root` that `word` names (find_run()) and has weights (weights_of_run()); `why_not` as
/// Wanted has it. Throws ConfigError when there is none.
RunWeights find_run_weights(const std::string& word, const std::string& root,
                            std::function<std::string(const report::RunDirectory&)> why_not = {});

/// The reason why a run has no text, for find_run_weights(); empty: it may have. So `latest` and a name mean
/// the newest run on text, whatever was trained on images since.
std::string why_no_text(const report::RunDirectory& run);

/// Whether `path` is a folder of Hugging Face: weights and the model that they are of.
bool is_hugging_face(const std::string& path);
/// The model of such a folder. Throws as plan::from_hugging_face().
plan::ModelConfig model_of_folder(const std::string& path);
/// The model of the weights that a run with this config leaves, with all that its weights depend on.
plan::ModelConfig complete_model(const plan::Config& config);

/// The run that a checkpoint, final weights or adapters belong to; empty: none.
std::string run_around(const std::filesystem::path& weights);
/// A folder with the files of the tokenizer that the weights at `weights` came with (FoundWeights); empty:
/// not known.
std::string came_with(const std::string& weights);

/// The weights that `word` names: a run's (weights_of_run()), a checkpoint, a Hugging Face folder or, with
/// the YAML file `config`, anything with tensors. Throws ConfigError when there are none, or nothing says
/// what model they are of.
FoundWeights find_weights(const std::string& word, const std::string& config, const Front& front);

}  // namespace trireme::cli
