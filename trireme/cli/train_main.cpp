#include "trireme/cli/train_main.h"

#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/base/program_path.h"
#include "trireme/cli/request.h"
#include "trireme/cli/worker_main.h"
#include "trireme/cli/worker_verbs.h"
#include "trireme/launch/fork_server.h"
#include "trireme/plan/yaml_text.h"

namespace trireme::cli {
namespace {

std::string front_command(const Environment& environment) {
  const std::string named = environment.get("TRIREME_COMMAND").value_or("");
  if (const auto found = find_trireme(named, environment)) return *found;
  throw EnvironmentError(
      "[cli.train_main] no program 'trireme' {}; set TRIREME_COMMAND to where it is, or put its folder into "
      "PATH",
      named.empty() ? "is beside this one or in PATH" : fmt::format("is at '{}'", named));
}

bool is_config(std::string_view word) {
  return word.ends_with(".yaml") || word.ends_with(".yml");
}

bool names_data(const std::string& config) {
  const YAML::Node data = plan::parse_yaml(read_file(config), config, "plan.config")["data"];
  return data.IsMap() && (data["path"] || data["mixture"]);
}

/// Whether a flag, a variable, the config, or the run that goes on says what is read.
bool is_data_named(const std::vector<std::string>& words, const Environment& environment) {
  bool has_config = false, resumes = false;
  for (const std::string& word : words) {
    if (word.starts_with("--data.path") || word.starts_with("--data.mixture")) return true;
    resumes = resumes || word.starts_with("--resume");
    const std::string_view value = std::string_view(word).substr(word.starts_with("--config=") ? 9 : 0);
    if (!is_config(value) || !std::filesystem::exists(value)) continue;
    has_config = true;
    if (names_data(std::string(value))) return true;
  }
  const bool by_variable =
      environment.get("TRIREME__DATA__PATH") || environment.get("TRIREME__DATA__MIXTURE");
  return by_variable || (resumes && !has_config);
}

/// Becomes `trireme train` with the words of this program.
[[noreturn]] void become_front(int argc, char** argv, const train::Program& program) {
  Environment environment = Environment::process();
  const std::string command = front_command(environment);
  environment.set(kProgramVariable, own_path());
  if (program.open_data && !is_data_named({argv + 1, argv + argc}, environment))
    environment.set("TRIREME__DATA__PATH", plan::kProgramData);
  std::string front = "trireme", verb = "train";
  std::vector<char*> words = {front.data(), verb.data()};
  for (int i = 1; i < argc; ++i) words.push_back(argv[i]);
  words.push_back(nullptr);
  set_process_environment(environment);
  ::execv(command.c_str(), words.data());
  throw EnvironmentError("[cli.train_main] cannot start {}: {}; check that it is an executable file", command,
                         errno_text(errno));
}

int run_request(const std::string& text, const Environment& environment, const train::Program& program) {
  const Request request = request_from_json(text);
  TRIREME_CHECK(request.verb == "train", "[cli.train_main] this program trains, and cannot '{}'",
                request.verb);
  return worker_train(request, environment, &program);
}

}  // namespace

int train_main(int argc, char** argv, const train::Program& program) {
  launch::serve_forks();
  try {
    const Environment environment = Environment::process();
    const auto request = environment.get("TRIREME_REQUEST");
    if (!request) become_front(argc, argv, program);
    run_worker([&] { return run_request(*request, environment, program); });
  } catch (const Error& error) {
    log_error("{}", error.what());
    return static_cast<int>(error.exit_code());
  }
}

}  // namespace trireme::cli
