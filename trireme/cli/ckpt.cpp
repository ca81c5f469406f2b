// trireme ckpt: checkpoints as files. None of it needs torch or a GPU.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/log.h"
#include "trireme/base/terminal.h"
#include "trireme/base/text.h"
#include "trireme/base/utf8.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/model_folder.h"
#include "trireme/checkpoint/new_folder.h"
#include "trireme/checkpoint/safetensors_header.h"
#include "trireme/checkpoint/source.h"
#include "trireme/checkpoint/store.h"
#include "trireme/cli/ckpt.h"
#include "trireme/cli/front.h"
#include "trireme/cli/runs.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;
using checkpoint::Checkpoint;
using checkpoint::Folder;
using checkpoint::Listed;
using Json = nlohmann::ordered_json;
using report::Align;

/// A key in the metadata of files that a run can go on from (state/state_file.h).
constexpr const char* kStateMark = "trireme.state";
constexpr const char* kOptimizerPrefix = "optimizer.";

struct CkptOptions {
  std::string path, other;
  int64_t keep = 0;
  int64_t files = 1;
  std::string to;
  bool force = false;
  bool weights_only = false;
  bool verify = false;
  bool json = false;
};

constexpr const char* kFinalWeights = "final/model.safetensors";

/// Whole or not.
bool holds_checkpoints(const std::string& path) {
  std::error_code error;
  return fs::is_directory(path, error) && !checkpoint::list_checkpoints(Folder(path)).empty();
}

/// The folder of checkpoints: of the run with the name `word`, or `word` itself. `or_weights`: a run with its
/// final weights alone counts.
std::string checkpoints_of(const std::string& word, const Front& front, bool or_weights = false) {
  if (holds_checkpoints(word)) return word;
  const auto is_there = [or_weights](const report::RunDirectory& run) {
    const std::string folder = run.file("checkpoints");
    std::error_code error;
    return holds_checkpoints(folder) ||
           (or_weights && fs::is_regular_file(folder + "/" + kFinalWeights, error));
  };
  const Wanted wanted{.what = or_weights ? "checkpoints or final weights" : "checkpoints",
                      .file = or_weights ? "checkpoints/step-*, checkpoints/final" : "checkpoints/step-*",
                      .is_there = is_there};
  return find_run(word, front.runs_root(), wanted).file("checkpoints");
}

/// A checkpoint or a safetensors file by its path, or the newest checkpoint of a run that is whole; of a run
/// without checkpoints its final weights.
std::string find_source(const std::string& word, const Front& front) {
  std::error_code error;
  if (checkpoint::is_checkpoint(word) || fs::is_regular_file(word, error) ||
      checkpoint::is_model_folder(word))
    return word;
  const std::string folder = checkpoints_of(word, front, /*or_weights=*/true);
  const checkpoint::Newest newest = checkpoint::newest_checkpoint(Folder(folder));
  for (const std::string& reason : newest.passed_over) log_warning("skipped {}", reason);
  if (newest.checkpoint) return newest.checkpoint->path();
  if (newest.passed_over.empty()) {
    const std::string final_weights = folder + "/" + kFinalWeights;
    log_info("{} has no checkpoints; using {}", folder, final_weights);
    return final_weights;
  }
  throw DataError("[cli.ckpt] {} has no intact checkpoint; 'trireme ckpt verify' says what is wrong", folder);
}

std::string format_size(int64_t bytes) {
  return format_bytes(static_cast<double>(bytes));
}

/// `verify`: every byte is read; else only what is needed to see that the files are there. Throws Removed.
Json describe(const Folder& folder, const Listed& listed, bool verify) {
  Json row{
      {"name", listed.name}, {"step", listed.step}, {"state", listed.unfinished ? "unfinished" : "damaged"}};
  if (!listed.commit) {
    row["problem"] = listed.problem;
    return row;
  }
  row["generation"] = listed.commit->generation;
  try {
    const Checkpoint found(folder.open_folder(listed.name));
    found.check_files();
    if (verify) {
      if (const std::vector<std::string> problems = found.verify(); !problems.empty())
        throw DataError("{}", join(problems, "; "));
    }
    row["state"] = "complete";
    row["read"] = verify;
    row["bytes"] = found.index().bytes();
    row["tensors"] = found.index().tensors.size();
    row["files"] = found.index().files.size();
  } catch (const checkpoint::Removed&) {
    throw;
  } catch (const Error& error) {
    if (!folder.has(listed.name)) throw checkpoint::Removed(folder.path_of(listed.name));
    row["problem"] = error.what();
  }
  return row;
}

int list(const CkptOptions& options, const Front& front) {
  const Folder folder(checkpoints_of(options.path, front));
  Json rows = Json::array();
  const auto add = [&](const std::vector<Listed>& all, bool undone) {
    for (const Listed& listed : all) {
      try {
        Json row = describe(folder, listed, options.verify);
        if (undone) row["undone"] = true;
        rows.push_back(std::move(row));
      } catch (const checkpoint::Removed& removed) {
        log_info("left out: {}", removed.what());
      }
    }
  };
  add(checkpoint::list_checkpoints(folder), false);
  add(checkpoint::list_undone(folder), true);
  if (options.json) {
    fmt::print(
        "{}\n",
        Json{{"schema", "trireme.ckpt.list/1"}, {"folder", folder.path()}, {"checkpoints", rows}}.dump(2));
    return 0;
  }
  report::Table table({{"name"},
                       {"step", Align::kRight},
                       {"run", Align::kRight},
                       {"size", Align::kRight},
                       {"files", Align::kRight},
                       {"state"}});
  for (const Json& row : rows) {
    const bool complete = row["state"] == "complete";
    table.add_row({row["name"], std::to_string(row["step"].get<int64_t>()),
                   row.contains("generation") ? std::to_string(row["generation"].get<int64_t>()) : "",
                   complete ? format_size(row["bytes"]) : "",
                   complete ? std::to_string(row["files"].get<size_t>()) : "",
                   complete ? fmt::format("complete{}{}", options.verify ? "" : ", not read",
                                          row.contains("undone") ? ", set aside" : "")
                            : fmt::format("{}: {}", row["state"].get<std::string>(),
                                          row["problem"].get<std::string>())});
  }
  fmt::print("{}\n{}", folder.path(), table.to_string(terminal_columns(STDOUT_FILENO)));
  return 0;
}

int inspect(const CkptOptions& options, const Front& front) {
  const auto source = checkpoint::open_source(find_source(options.path, front));
  int64_t bytes = 0;
  Json tensors = Json::object();
  for (const auto& [name, tensor] : source->tensors()) {
    bytes += tensor.bytes();
    tensors[name] = {{"dtype", tensor.dtype},
                     {"shape", checkpoint::shape_in_file(tensor.dtype, tensor.shape)}};
  }
  Json document{{"schema", "trireme.ckpt.inspect/1"},
                {"path", source->path()},
                {"bytes", bytes},
                {"metadata", source->metadata()}};
  if (checkpoint::is_checkpoint(source->path())) {
    const Checkpoint found(source->path());
    document["step"] = found.commit().step;
    document["generation"] = found.commit().generation;
    document["files"] = found.index().files.size();
    document["state"] = Json::parse(found.state());
  }
  document["tensors"] = tensors;
  if (options.json) {
    fmt::print("{}\n", document.dump(2));
    return 0;
  }
  fmt::print("{}: {} tensors, {}", source->path(), source->tensors().size(), format_size(bytes));
  if (document.contains("step"))
    fmt::print(", step {}, {} files", document["step"].get<int64_t>(), document["files"].get<size_t>());
  fmt::print("\n");
  report::Table table({{"tensor"}, {"dtype"}, {"shape"}, {"size", Align::kRight}});
  for (const auto& [name, tensor] : source->tensors())
    table.add_row({printable_line(name), tensor.dtype,
                   fmt::format("{}", fmt::join(checkpoint::shape_in_file(tensor.dtype, tensor.shape), " x ")),
                   format_size(tensor.bytes())});
  fmt::print("{}", table.to_string(terminal_columns(STDOUT_FILENO)));
  return 0;
}

std::vector<std::string> problems_of(const std::string& path, int64_t& bytes) {
  try {
    const Checkpoint found(path);
    bytes += found.index().bytes();
    return found.verify();
  } catch (const checkpoint::Removed&) {
    throw;
  } catch (const Error& error) {
    return {error.what()};
  }
}

/// One checkpoint, or all of a run. Exit code 7 when any is damaged. Those of a run that are removed
/// meanwhile are left out; where none remains, or the one that was named is removed, it throws Removed.
int verify(const CkptOptions& options, const Front& front) {
  std::vector<std::string> paths;
  if (checkpoint::is_checkpoint(options.path)) {
    paths = {options.path};
  } else {
    const Folder folder(checkpoints_of(options.path, front));
    for (const auto& all : {checkpoint::list_checkpoints(folder), checkpoint::list_undone(folder)}) {
      for (const Listed& listed : all) paths.push_back(folder.path_of(listed.name));
    }
  }
  Json rows = Json::array(), gone = Json::array();
  bool good = true;
  for (const std::string& path : paths) {
    int64_t bytes = 0;
    std::vector<std::string> problems;
    try {
      problems = problems_of(path, bytes);
    } catch (const checkpoint::Removed& removed) {
      gone.push_back(path);
      if (gone.size() == paths.size()) throw;
      log_info("left out: {}", removed.what());
      continue;
    }
    good &= problems.empty();
    rows.push_back({{"path", path}, {"bytes", bytes}, {"problems", problems}});
    if (options.json) continue;
    fmt::print("{}: {}\n", path, problems.empty() ? format_size(bytes) + " as written" : "damaged");
    for (const std::string& problem : problems) fmt::print("  {}\n", problem);
  }
  if (options.json)
    fmt::print("{}\n", Json{{"schema", "trireme.ckpt.verify/1"},
                            {"good", good},
                            {"checkpoints", rows},
                            {"removed_meanwhile", gone}}
                           .dump(2));
  return static_cast<int>(good ? ExitCode::kOk : ExitCode::kCorruptData);
}

/// Exit code 8 when they differ.
int diff(const CkptOptions& options, const Front& front) {
  const auto a = checkpoint::open_source(find_source(options.path, front));
  const auto b = checkpoint::open_source(find_source(options.other, front));
  const std::vector<checkpoint::Difference> differences = checkpoint::compare(*a, *b);
  const int code = static_cast<int>(differences.empty() ? ExitCode::kOk : ExitCode::kComparison);
  if (options.json) {
    Json rows = Json::array();
    for (const auto& difference : differences)
      rows.push_back({{"tensor", difference.tensor},
                      {"what", difference.what},
                      {"elements", difference.elements},
                      {"largest", difference.largest}});
    fmt::print("{}\n", Json{{"schema", "trireme.ckpt.diff/1"},
                            {"a", a->path()},
                            {"b", b->path()},
                            {"equal", differences.empty()},
                            {"differences", rows}}
                           .dump(2));
    return code;
  }
  if (differences.empty()) {
    fmt::print("equal: {} tensors, bit for bit\n", a->tensors().size());
    return code;
  }
  report::Table table({{"tensor"}, {"differs"}, {"by at most", Align::kRight}});
  for (const auto& difference : differences)
    table.add_row({printable_line(difference.tensor), difference.what,
                   difference.largest > 0.0 ? fmt::format("{:.3g}", difference.largest) : ""});
  fmt::print("{}", table.to_string(terminal_columns(STDOUT_FILENO)));
  return code;
}

void check_files(const CkptOptions& options) {
  if (options.files >= 1 && options.files <= 65536) return;
  throw ConfigError("[cli.ckpt] --files is {}, but must be from 1 to 65536", options.files);
}

/// As PyTorch's distributed checkpoint reads it.
void convert_to_dcp(const checkpoint::Source& source, const CkptOptions& options,
                    const checkpoint::Conversion& how) {
  check_files(options);
  std::vector<std::string> tensors;
  for (const auto& [name, tensor] : source.tensors()) {
    if (!how.select || how.select(name)) tensors.push_back(name);
  }
  if (options.force) check_replaceable(options.other);
  checkpoint::NewFolder out(options.other, options.force);
  checkpoint::write_dcp_files(out.folder(), source, tensors, options.files);
  out.commit();
}

int convert(const CkptOptions& options, const Front& front) {
  const std::string from = find_source(options.path, front);
  const auto source = checkpoint::open_source(from);
  checkpoint::Conversion how{.files = options.files, .replaces = options.force};
  if (options.weights_only) {
    how.select = [](const std::string& name) { return !name.starts_with(kOptimizerPrefix); };
    how.without = {kStateMark};
  }
  if (checkpoint::is_checkpoint(from)) {
    const Checkpoint found(from);
    how.step = found.commit().step;
    if (!options.weights_only) how.state = Json::parse(found.state()).value("run", Json::object()).dump();
  }
  std::string written = options.other;
  if (options.to == "dcp") {
    convert_to_dcp(*source, options, how);
  } else if (!options.to.empty()) {
    throw ConfigError("[cli.ckpt] --to {} is unknown; only dcp is supported", options.to);
  } else if (options.other.ends_with(".safetensors")) {
    if (options.files != 1)
      throw ConfigError("[cli.ckpt] --files {} cannot be used with the single file {}; give a folder",
                        options.files, options.other);
    checkpoint::convert_to_file(*source, options.other, how);
  } else {
    check_files(options);
    written += "/" + checkpoint::convert_to_checkpoint(*source, options.other, how);
  }
  if (options.json) {
    fmt::print("{}\n", Json{{"schema", "trireme.ckpt.convert/1"}, {"from", from}, {"to", written}}.dump(2));
  } else {
    fmt::print("{}\n", written);
  }
  return 0;
}

int prune(const CkptOptions& options, const Front& front) {
  if (options.keep < 1)
    throw ConfigError("[cli.ckpt] --keep {} would remove every checkpoint; use 1 or more", options.keep);
  const Folder folder(checkpoints_of(options.path, front));
  const std::vector<std::string> removed = checkpoint::prune_checkpoints(folder.path(), options.keep);
  if (options.json) {
    fmt::print(
        "{}\n",
        Json{{"schema", "trireme.ckpt.prune/1"}, {"folder", folder.path()}, {"removed", removed}}.dump(2));
    return 0;
  }
  for (const std::string& name : removed) fmt::print("removed {}\n", folder.path_of(name));
  return 0;
}

using Action = int (*)(const CkptOptions&, const Front&);

CLI::App* add_verb(CLI::App& ckpt, Front& front, const std::shared_ptr<CkptOptions>& options,
                   const char* name, const char* text, Action action) {
  CLI::App* verb = ckpt.add_subcommand(name, text);
  verb->add_flag("--json", options->json, "Print one JSON document");
  add_run_dir(*verb, front);
  verb->callback([options, &front, action] {
    front.action = [options, &front, action] { return action(*options, front); };
  });
  return verb;
}

CLI::Option* add_path(CLI::App* verb, const char* name, std::string& path, const char* text) {
  return verb->add_option(name, path, text)->required()->option_text(" ");
}

}  // namespace

void check_replaceable(const std::string& path, const std::string& beside) {
  std::error_code error;
  if (!fs::is_directory(path, error) || fs::is_empty(path, error)) return;  // NewFolder knows what to do
  const auto entries = fs::directory_iterator(path, error);
  const bool has_weights = std::any_of(
      entries, fs::directory_iterator(),
      [](const fs::directory_entry& entry) { return entry.path().extension() == ".safetensors"; });
  if (has_weights && (beside.empty() || fs::exists(path + "/" + beside, error))) return;
  throw EnvironmentError(
      "[cli.ckpt] {} is neither empty nor an earlier export (safetensors files{}{}), so --force does not "
      "replace it; choose another folder, or remove this one yourself",
      path, beside.empty() ? "" : " and ", beside);
}

void add_ckpt(CLI::App& app, Front& front) {
  auto options = std::make_shared<CkptOptions>();
  CLI::App* ckpt = app.add_subcommand("ckpt", "Inspect, verify, compare, convert and remove checkpoints");
  ckpt->require_subcommand(1);
  constexpr const char* kRun = "Run directory, name of a run, 'latest', or a folder of checkpoints";
  constexpr const char* kOne =
      "Checkpoint, safetensors file, Hugging Face or DCP folder, or run (its newest intact checkpoint, or "
      "its final weights if it has none)";
  CLI::App* verb =
      add_verb(*ckpt, front, options, "list", "List the checkpoints of a run, oldest first", list);
  add_path(verb, "RUN", options->path, kRun);
  verb->add_flag("--verify", options->verify, "Read every byte and check it against the digests");
  verb = add_verb(*ckpt, front, options, "inspect", "Show the contents of a checkpoint or safetensors file",
                  inspect);
  add_path(verb, "PATH", options->path, kOne);
  verb = add_verb(*ckpt, front, options, "verify",
                  "Read every byte and check it against the digests; exit code 7 if damaged", verify);
  add_path(verb, "PATH", options->path, "Checkpoint, or a run to verify all of its checkpoints");
  verb =
      add_verb(*ckpt, front, options, "diff", "Compare two, bit for bit; exit code 8 if they differ", diff);
  add_path(verb, "A", options->path, kOne);
  add_path(verb, "B", options->other, kOne);
  verb = add_verb(*ckpt, front, options, "convert",
                  "Rewrite a checkpoint as another number of files, or as a single file", convert);
  add_path(verb, "FROM", options->path, kOne);
  add_path(verb, "TO", options->other, "FILE.safetensors, or a folder of checkpoints");
  verb->add_option("--files", options->files, "Files of the new checkpoint (default: 1)")->option_text("N");
  verb->add_option("--to", options->to,
                   "dcp: write a folder that PyTorch's HuggingFaceStorageReader can read")
      ->option_text("FORMAT");
  verb->add_flag("--force", options->force,
                 "Replace TO if it is a file, or with --to an empty folder or an earlier export");
  verb->add_flag("--weights-only", options->weights_only, "Leave out the optimizer state");
  add_hugging_face(*ckpt, front);
  add_merge(*ckpt, front);
  verb = add_verb(*ckpt, front, options, "prune",
                  "Remove all but the newest checkpoints that are intact, which it reads first", prune);
  add_path(verb, "RUN", options->path, kRun);
  verb->add_option("--keep", options->keep, "Number of checkpoints to keep")->required()->option_text("N");
}

}  // namespace trireme::cli
