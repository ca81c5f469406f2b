#pragma once
// Common to all verbs of the front command: the command line, the environment, and the action that the parsed
// verb chose.
#include <fmt/format.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/base/env.h"
#include "trireme/base/error.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace trireme::cli {

/// A command line that cannot be understood; the hint goes on a line of its own.
class UsageError : public Error {
 public:
  UsageError(const std::string& message, std::string hint)
      : Error(ExitCode::kUsage, message), hint_(std::move(hint)) {}
  const std::string& hint() const { return hint_; }

 private:
  std::string hint_;
};

struct Front {
  Environment environment;
  std::string command;                 ///< as typed, quoted for a shell
  std::vector<std::string> overrides;  ///< "section.key=value", taken out of the command line
  std::function<int()> action;         ///< set while parsing; returns the exit code

  /// Parent of run directories: TRIREME_RUN_DIR or "runs".
  std::string runs_root() const { return environment.get("TRIREME_RUN_DIR").value_or("runs"); }
};

// One verb, one source file. Each adds its subcommand, whose callback sets front.action.
void add_train(CLI::App& app, Front& front);
void add_launch(CLI::App& app, Front& front);
void add_generate(CLI::App& app, Front& front);
void add_eval(CLI::App& app, Front& front);
void add_bench(CLI::App& app, Front& front);
void add_bench_images(CLI::App& bench, Front& front);
void add_bench_memory(CLI::App& bench, Front& front);
void add_bench_pipeline(CLI::App& bench, Front& front);
void add_bench_results(CLI::App& bench, Front& front);
void add_bench_run(CLI::App& bench, Front& front);
void add_bench_speed(CLI::App& bench, Front& front);
void add_bench_targets(CLI::App& bench, Front& front);
void add_ckpt(CLI::App& app, Front& front);
void add_data(CLI::App& app, Front& front);
void add_data_inspect(CLI::App& data, Front& front);
void add_data_train_tokenizer(CLI::App& data, Front& front);
void add_doctor(CLI::App& app, Front& front);
void add_plan(CLI::App& app, Front& front);
void add_plan_mesh(CLI::App& plan, Front& front);
void add_plan_placements(CLI::App& plan, Front& front);
void add_plan_signals(CLI::App& plan, Front& front);
void add_plan_step(CLI::App& plan, Front& front);
void add_plan_time(CLI::App& plan, Front& front);
void add_pipeline(CLI::App& app, Front& front);
void add_lab(CLI::App& app, Front& front);
void add_ps(CLI::App& app, Front& front);
void add_serve(CLI::App& app, Front& front);
void add_top(CLI::App& app, Front& front);
void add_sweep(CLI::App& app, Front& front);
void add_find_lr(CLI::App& app, Front& front);
void add_replay(CLI::App& app, Front& front);
void add_report(CLI::App& app, Front& front);
void add_presets(CLI::App& app, Front& front);
void add_config(CLI::App& app, Front& front);
void add_worker(CLI::App& app, Front& front);
void add_version(CLI::App& app, Front& front);

/// Adds the config file to `verb`, as the argument CONFIG and as the option --config FILE, of which one may
/// be given.
void add_config_file(CLI::App& verb, std::string& path);
/// --gpu, for plans of machines that are elsewhere.
CLI::Option* add_planned_gpu(CLI::App& verb, std::string& gpu);

/// The words of a command line about DeepSpeed's file.
struct DeepSpeedOptions {
  std::string config;  ///< behind --deepspeed_config
  std::string word;    ///< behind --deepspeed, which may stand alone
};

/// Adds --deepspeed_config FILE and --deepspeed [FILE] to `verb`; returns the latter.
CLI::Option* add_deepspeed(CLI::App& verb, DeepSpeedOptions& options);

/// The file that they name; empty: none. `flag`: --deepspeed was given. Where it stands before a word that
/// is not its own, that word is `config`. Throws UsageError when there is a flag without a file.
std::string deepspeed_file(const DeepSpeedOptions& options, bool flag, std::string& config);

/// Adds --run-dir to `verb`, where it looks for runs instead of in Front::runs_root().
void add_run_dir(CLI::App& verb, Front& front);

/// The help of an option with its default.
template <typename Value>
std::string with_default(const std::string& help, const Value& value) {
  return fmt::format("{} (default: {})", help, value);
}

/// "trireme 0.1.0 (Release, GNU 12.2.0, torch 2.11.0, CUDA)".
std::string version_line();

}  // namespace trireme::cli
