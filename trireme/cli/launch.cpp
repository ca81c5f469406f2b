#include "trireme/launch/local.h"

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <optional>

#include "trireme/base/build_info.h"
#include "trireme/base/program_path.h"
#include "trireme/base/text.h"
#include "trireme/cli/front.h"
#include "trireme/cli/gpu_count.h"
#include "trireme/cli/run_plan.h"

namespace trireme::cli {
namespace {

struct LaunchOptions {
  std::optional<int64_t> ranks;
  std::string log_dir;
};

/// The program is no option, so that those behind it stay its own: its usage has to be told.
class ProgramUsage final : public CLI::Formatter {
 public:
  std::string make_usage(const CLI::App* app, std::string name) const override {
    std::string usage = CLI::Formatter::make_usage(app, std::move(name));
    return usage.insert(usage.find_last_not_of('\n') + 1, " PROGRAM [ARGUMENTS...]");
  }
};

/// The program as a shell finds it: a path, or a name in PATH.
std::string program_path(const std::string& word, const Environment& environment) {
  const auto runs = [](const std::filesystem::path& path) {
    std::error_code error;
    return std::filesystem::is_regular_file(path, error) && ::access(path.c_str(), X_OK) == 0;
  };
  if (word.find('/') != std::string::npos) {
    if (runs(word)) return std::filesystem::absolute(word).string();
  } else {
    for (const std::string& folder : split(environment.get("PATH").value_or(""), ':')) {
      if (runs(std::filesystem::path(folder) / word)) return (std::filesystem::path(folder) / word).string();
    }
    if (runs(word)) return std::filesystem::absolute(word).string();
  }
  throw ConfigError(
      "[cli.launch] '{}' is not an executable program, neither as a path nor in PATH; check its name", word);
}

int launch_program(const LaunchOptions& options, const std::vector<std::string>& words, const Front& front) {
  if (words.empty() || words.front().starts_with("-")) {
    throw UsageError(words.empty() ? "[cli.launch] no program was given"
                                   : fmt::format("[cli.launch] unknown option '{}'", words.front()),
                     "write: trireme launch -n RANKS PROGRAM ARGUMENTS...");
  }
  const int gpus = kHasCuda ? gpu_count() : 0;
  const plan::Device device = choose_device(plan::Device::kAuto, gpus);
  Environment environment = front.environment;
  if (!environment.get("TRIREME_COMMAND")) environment.set("TRIREME_COMMAND", own_path());
  return launch::run_local({.program = program_path(words.front(), front.environment),
                            .args = {words.begin() + 1, words.end()},
                            .ranks = choose_ranks(options.ranks, device, gpus),
                            .environment = std::move(environment),
                            .log_dir = options.log_dir,
                            .usr1_stops = false,
                            .stop_notice = "signal passed on to all ranks; send it again to kill them now"});
}

}  // namespace

void add_launch(CLI::App& app, Front& front) {
  auto options = std::make_shared<LaunchOptions>();
  CLI::App* verb = app.add_subcommand("launch", "Start your own program as ranks on this machine");
  auto formatter = std::make_shared<ProgramUsage>();
  formatter->column_width(app.get_formatter()->get_column_width());
  verb->formatter(formatter);
  verb->prefix_command();  // what follows the program's name is the program's
  verb->add_option("-n,--ranks", options->ranks, "Ranks to start (default: all GPUs, else 2)")
      ->option_text("RANKS");
  verb->add_option("--log-dir", options->log_dir, "Folder for one log file per rank")->option_text("DIR");
  verb->footer(
      "The program finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT;\n"
      "comm::World::join_environment() reads them. If one rank fails, the others are stopped.\n"
      "SIGUSR1 is passed on to the ranks each time; SIGTERM, SIGINT and SIGHUP once, and they have 120 s.\n"
      "Example:\n"
      "  trireme launch -n 4 ./own_module");
  verb->callback([verb, options, &front] {
    front.action = [options, words = verb->remaining(), &front] {
      return launch_program(*options, words, front);
    };
  });
}

}  // namespace trireme::cli
