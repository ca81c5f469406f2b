#include "trireme/cli/dev_run.h"

#include <algorithm>
#include <filesystem>
#include <map>

#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/plan/model_family.h"
#include "trireme/report/run_dir.h"
#include "trireme/report/run_record.h"

namespace trireme::cli {
namespace {

using ComparisonError = TypedError<ExitCode::kComparison>;

/// Below the parent of run directories, as runs of benchmarks have one.
constexpr const char* kFolder = "fast_dev_run";

/// Every save is on the disk before the next step, so that there is one to go on from.
std::vector<std::string> short_keys(const plan::Config& config) {
  const plan::TrainConfig& train = config.train;
  const int64_t steps = train.fast_dev_run;
  const bool samples = !plan::reads_images(config.model.family) && !train.sample_prompt.empty();
  std::vector<std::string> keys = {
      "train.fast_dev_run=0",         "train.epochs=0",    "train.early_stop=0",
      "train.early_stop_min_delta=0", "train.val_every=1", "train.log_every=1",
      "checkpoint.every=1",           "checkpoint.keep=2", "checkpoint.async=false"};
  const auto at_most = [&](const char* key, int64_t value) {
    keys.push_back(fmt::format("{}={}", key, std::min(value, steps)));
  };
  if (!config.checkpoint.best) keys.emplace_back("train.monitor=");
  at_most("train.steps", steps);
  at_most("optim.warmup_steps", config.optim.warmup_steps);
  at_most("train.val_batches", train.val_batches);
  at_most("train.profile_steps", train.profile_steps);
  at_most("train.sample_tokens", samples ? steps : 0);
  if (config.parallel.comm_hook == plan::CommHook::kLocalSgd) keys.emplace_back("parallel.local_steps=1");
  return keys;
}

std::map<std::string, std::string> values_of(plan::Config config) {
  std::map<std::string, std::string> values;
  for (const plan::Field& field : plan::fields(config))
    values[field.key] =
        std::visit([](const auto& value) { return fmt::format("{}", value); }, plan::value_of(field));
  return values;
}

/// The lengths that are shorter now, beside the key that asked for it.
std::vector<std::string> differences(const plan::Config& before, const plan::Config& after) {
  const auto old_values = values_of(before), new_values = values_of(after);
  std::vector<std::string> found;
  for (const std::string& key : plan::differing_keys(before, after)) {
    if (key != "train.fast_dev_run")
      found.push_back(fmt::format("{}={} instead of {}", key, new_values.at(key), old_values.at(key)));
  }
  return found;
}

/// The save from which the last step is made again, or the only one.
std::string last_save_but_one(const std::string& run, int64_t steps) {
  const std::string path = fmt::format("{}/checkpoints/step-{:08}", run, std::max<int64_t>(steps - 1, 1));
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return path;
  throw EnvironmentError(
      "[cli.fast_dev_run] {} was not written, so that resuming is not tried; the warnings above say why",
      path);
}

RunSummary summary_of_run(const std::string& run) {
  const std::optional<RunSummary> summary = report::read_run(run).summary;
  if (!summary) throw EnvironmentError("[cli.fast_dev_run] {} has no summary.json", run);
  return *summary;
}

void check_same_end(const RunSummary& first, const RunSummary& second, const std::string& run) {
  if (!first.why_bits_vary.empty() || first.weights_digest == second.weights_digest) return;
  throw ComparisonError(
      "[cli.fast_dev_run] {} ended with the weights {}, and with {} after it had gone on from its last save "
      "but one: resuming is not exact",
      run, first.weights_digest, second.weights_digest);
}

/// "training, validation, saving, resuming and sampling work".
std::string what_works(const RunSummary& summary) {
  std::string works = "training, ";
  if (summary.final_val_loss) works += "validation, ";
  works += summary.sample.empty() ? "saving and resuming work" : "saving, resuming and sampling work";
  if (!summary.final_val_loss) works += "; nothing was validated";
  return works;
}

}  // namespace

std::optional<DevRun> dev_run_of(const TrainJob& job, const Front& front) {
  if (!job.resume.empty()) return std::nullopt;  // its config may be that of the run
  if (load_config(job, front).config.train.fast_dev_run == 0) return std::nullopt;
  DevRun dev{.job = job, .shortened = {}};
  settle_weights_of(dev.job, front);
  const plan::Config whole = load_config(dev.job, front).config;
  for (const std::string& key : short_keys(whole)) dev.job.overrides.push_back(key);
  dev.job.run_dir = runs_root(job, front) + "/" + kFolder;
  dev.shortened = differences(whole, load_config(dev.job, front).config);
  return dev;
}

FinishedJob run_dev_run(const DevRun& dev, Front& front) {
  log_info("dev     tries everything once: {}", join(dev.shortened, ", "));
  FinishedJob first = run_train_job(dev.job, front);
  if (first.code != 0) return first;
  const std::string run = first.run_directory, where = report::as_typed(run);
  const RunSummary ended = summary_of_run(run);
  TrainJob again = dev.job;
  again.resume = last_save_but_one(run, first.prepared.config.config.train.steps);
  log_info("dev     goes on from {}", report::as_typed(again.resume));
  FinishedJob second = run_train_job(again, front);
  if (second.code != 0) return second;
  check_same_end(ended, summary_of_run(run), where);
  log_info("dev     {}; {} holds what this run has left, and 'latest' and --resume do not look there",
           what_works(ended), where);
  return second;
}

}  // namespace trireme::cli
