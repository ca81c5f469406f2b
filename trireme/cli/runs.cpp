#include "trireme/cli/runs.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/launch/exits.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

std::string real_path(const std::string& path) {
  std::error_code ignored;
  const fs::path real = fs::weakly_canonical(fs::absolute(path), ignored);
  return real.empty() ? path : real.string();
}

bool is_run(const std::string& path) {
  std::error_code ignored;
  return fs::exists(path + "/manifest.json", ignored);
}

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

bool has(const report::RunDirectory& run, const Wanted& wanted) {
  if (wanted.is_there) return wanted.is_there(run);
  std::error_code ignored;
  return fs::exists(run.file(wanted.file), ignored);
}

/// Whether the run says that it has written what is wanted.
bool has_saved(const report::RunDirectory& run, const Wanted& wanted) {
  const std::string path = run.file("summary.json");
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return false;
  const auto summary = nlohmann::json::parse(read_file(path), nullptr, false);
  if (!summary.is_object()) return false;
  const auto weights = summary.find("weights"), saves = summary.find("checkpoints");
  const bool kept_weights = weights != summary.end() && weights->is_string();
  const bool saved =
      saves != summary.end() && saves->is_object() && saves->contains("written") && saves->at("written") != 0;
  return (contains(wanted.what, "checkpoints") && saved) ||
         (contains(wanted.what, "weights") && kept_weights);
}

/// "it ended with code 6 (NaN or infinity)".
std::string how_it_ended(const report::RunDirectory& run, const Wanted& wanted) {
  if (has_saved(run, wanted)) return "what it had saved has been removed";
  const auto code = run.exit_code();
  if (!code) return "it is still running, or was killed";
  if (*code == 0) return "it finished, but was configured to save none";
  return fmt::format("it ended with code {}{}", *code, launch::meaning(*code));
}

report::RunDirectory open_with(const std::string& path, const Wanted& wanted) {
  report::RunDirectory run = report::RunDirectory::open(path);
  if (has(run, wanted)) return run;
  throw ConfigError("[cli.runs] {} has no {} ({}): {}; choose another run", run.path(), wanted.what,
                    wanted.file, how_it_ended(run, wanted));
}

report::RunDirectory newest_with(const std::vector<std::string>& paths, const std::string& word,
                                 const std::string& root, const Wanted& wanted) {
  std::vector<std::string> passed_over;
  for (const std::string& path : paths) {
    try {
      report::RunDirectory run = report::RunDirectory::open(path);
      const bool is_there = has(run, wanted);
      const std::string why_not = is_there && wanted.why_not ? wanted.why_not(run) : std::string();
      if (is_there && why_not.empty()) {
        if (!passed_over.empty()) log_info("{}; using {}", join(passed_over, "; "), run.path());
        return run;
      }
      passed_over.push_back(
          is_there ? fmt::format("{} is passed over: {}", run.path(), why_not)
                   : fmt::format("{} has no {}: {}", run.path(), wanted.what, how_it_ended(run, wanted)));
    } catch (const Error& error) {
      passed_over.push_back(fmt::format("{} cannot be read: {}", path, error.what()));
    }
  }
  const std::string which = word == "latest" ? "runs" : fmt::format("runs named '{}'", word);
  throw ConfigError("[cli.runs] none of the {} {} below {} has {} ({}); the latest: {}", paths.size(), which,
                    real_path(root), wanted.what, wanted.file, passed_over.front());
}

}  // namespace

report::RunDirectory find_run(const std::string& word, const std::string& root, const Wanted& wanted) {
  if (word.empty()) {
    throw ConfigError(
        "[cli.runs] the word for a run is empty; name a run, its folder or 'latest', and in a script check "
        "the "
        "variable that holds it");
  }
  const bool latest = word == "latest";
  if (is_run(word)) return open_with(word, wanted);
  if (!latest && is_run(root + "/" + word)) return open_with(root + "/" + word, wanted);
  const auto runs = report::list_runs(root, latest ? "" : word);
  if (!runs.empty()) return newest_with(runs, word, root, wanted);
  if (fs::exists(word)) return report::RunDirectory::open(word);  // says why it is none
  throw ConfigError(
      "[cli.runs] no run '{}' was found, neither at {} nor below {}; 'trireme train' makes runs", word,
      real_path(word), real_path(root));
}

void check_page_path(const std::string& path) {
  if (path.empty()) return;
  const fs::path folder = fs::absolute(path).parent_path();
  std::error_code ignored;
  if (fs::is_directory(path, ignored) || path.ends_with('/')) {
    throw ConfigError("[cli.report] --output {} is a folder; give a file, such as {}", path,
                      (fs::path(path) / "report.html").string());
  }
  if (!fs::is_directory(folder, ignored)) {
    throw ConfigError(
        "[cli.report] --output {}: the folder {} does not exist; create it, or give another file", path,
        folder.string());
  }
}

}  // namespace trireme::cli
