#include "trireme/cli/weights_run.h"

#include <filesystem>
#include <set>

#include "trireme/base/file.h"
#include "trireme/checkpoint/fit.h"
#include "trireme/checkpoint/model_folder.h"
#include "trireme/checkpoint/unfinished.h"
#include "trireme/cli/weights.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

void carry_files(const std::string& from, const std::string& to) {
  make_directories(to);
  const checkpoint::Folder beside(to);
  checkpoint::carry_file(from, checkpoint::kModelConfigName, beside);
  const checkpoint::CarriedFiles carried = checkpoint::carried_files(from);
  for (const std::string& name : carried.there) checkpoint::carry_file(from, name, beside);
}

/// `root`: where the run is going to be.
void fill(const report::RunDirectory& run, const std::string& root, const WeightsRun& made,
          const checkpoint::Source& weights) {
  constexpr const char* kWeights = "checkpoints/final/model.safetensors";
  plan::Config config = made.config;
  const std::string file = run.file(kWeights);
  make_directories(fs::path(file).parent_path());
  const std::vector<std::string> names = checkpoint::parameter_names(plan::describe(config.model, 1));
  const std::set<std::string> wanted(names.begin(), names.end());
  checkpoint::convert_to_file(
      weights, file, {.select = [&wanted](const std::string& name) { return wanted.contains(name); }});
  if (!made.came_with.empty()) carry_files(made.came_with, run.file(kImported));
  const fs::path place = fs::canonical(root) / fs::path(run.path()).filename();
  config.model.weights = place / kWeights;
  if (made.speaks) config.data.tokenizer = place / kImported;
  write_file_atomic(run.file("config.yaml"), plan::to_yaml({config, {}}));
}

}  // namespace

std::string checked_name(const std::string& name) {
  return plan::load({.path = "", .text = "", .overrides = {"name=" + name}}, Environment()).config.name;
}

report::RunDirectory make_weights_run(const WeightsRun& made, const checkpoint::Source& weights,
                                      const Front& front) {
  const std::string root = front.runs_root(), name = made.config.name;
  make_directories(root);
  const checkpoint::Unfinished place(root + "/" + name, checkpoint::Unfinished::Kind::kFolder);
  const auto run = report::RunDirectory::create(place.path(), name,
                                                {.command = front.command,
                                                 .config_yaml = plan::to_yaml({made.config, {}}),
                                                 .device = "cpu",
                                                 .mesh = "",
                                                 .ranks = 1});
  fill(run, root, made, weights);
  run.finish(0);
  return run.move_to(root);
}

}  // namespace trireme::cli
