// trireme ckpt import-hf and export-hf: models of Hugging Face's transformers as runs, and the other way
// round. Tensors are streamed: what is held is some MiB, however large the model.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/checkpoint/fit.h"
#include "trireme/checkpoint/model_folder.h"
#include "trireme/checkpoint/new_folder.h"
#include "trireme/checkpoint/unfinished.h"
#include "trireme/cli/ckpt.h"
#include "trireme/cli/data_path.h"
#include "trireme/cli/front.h"
#include "trireme/cli/weights.h"
#include "trireme/cli/weights_run.h"
#include "trireme/plan/hugging_face.h"
#include "trireme/report/run_dir.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct ImportOptions {
  std::string folder, name;
  std::vector<std::string> ignored;
  bool drop_extra = false;
  bool json = false;
};

std::string name_of(const ImportOptions& options) {
  if (!options.name.empty()) return options.name;
  return fs::weakly_canonical(fs::absolute(options.folder)).filename().string();
}

int import_hf(const ImportOptions& options, const Front& front) {
  plan::Config config;
  config.name = checked_name(name_of(options));
  const std::set<std::string> ignored(options.ignored.begin(), options.ignored.end());
  config.model = plan::from_hugging_face(checkpoint::read_model_config(options.folder),
                                         options.folder + "/" + checkpoint::kModelConfigName, ignored);
  config.data.seq_len = std::min(config.model.max_seq_len, kUsualLength);
  const auto weights = checkpoint::open_model_folder(options.folder);
  checkpoint::check_fit(*weights, plan::describe(config.model, config.data.seq_len), options.drop_extra);
  checkpoint::check_tied_head(options.folder);
  const std::string no_tokenizer = why_no_tokenizer(options.folder, config.model);
  const report::RunDirectory run = make_weights_run(
      {.config = config, .came_with = options.folder, .speaks = no_tokenizer.empty()}, *weights, front);
  const std::string path = report::as_typed(run.path());
  if (no_tokenizer.empty()) {
    log_info("data.tokenizer is the folder's tokenizer, copied to {}/{}", path, kImported);
  } else {
    log_warning(
        "{} gives no tokenizer, so data.tokenizer is '{}', which means nothing to these weights: {}; name "
        "another one with --data.tokenizer",
        options.folder, plan::kByteTokenizer, no_tokenizer);
  }
  if (options.json) {
    const int64_t params = plan::describe(config.model, config.data.seq_len).params;
    fmt::print("{}\n", Json{{"schema", "trireme.ckpt.import-hf/1"},
                            {"from", options.folder},
                            {"run", run.path()},
                            {"config", run.file("config.yaml")},
                            {"tokenizer", no_tokenizer.empty() ? Json(run.file(kImported)) : Json()},
                            {"family", plan::name(config.model.family)},
                            {"params", params}}
                           .dump(2));
  } else {
    fmt::print("{}\ntrain from it: trireme train {}/config.yaml --data.path=TEXT\n", path, path);
  }
  return 0;
}

struct ExportOptions {
  std::string weights, out, config, tokenizer;
  std::string dtype;
  std::string max_shard_size = "5GB";
  bool force = false;
  bool json = false;
};

struct DtypeWords {
  const char *word, *stored, *theirs;
};
constexpr DtypeWords kDtypes[] = {
    {"fp32", "F32", "float32"}, {"bf16", "BF16", "bfloat16"}, {"fp16", "F16", "float16"}};

/// The name of the dtype in safetensors.
std::string stored_dtype(const std::string& word) {
  if (word.empty()) return {};
  std::vector<std::string> words;
  for (const DtypeWords& dtype : kDtypes) {
    if (word == dtype.word) return dtype.stored;
    words.emplace_back(dtype.word);
  }
  throw ConfigError("[cli.ckpt] --dtype {} is unknown; choose one of {}", word, join(words, ", "));
}

int64_t parse_size(const std::string& text) {
  struct Unit {
    const char* word;
    double bytes;
  };
  constexpr Unit kUnits[] = {{"", 1.0},       {"B", 1.0},         {"KB", 1e3},
                             {"MB", 1e6},     {"GB", 1e9},        {"TB", 1e12},
                             {"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0}};
  double count = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  const std::string word(end, text.data() + text.size());
  for (const Unit& unit : kUnits) {
    const double bytes = count * unit.bytes;
    if (error == std::errc() && word == unit.word && bytes >= 1.0 && bytes <= 1e18)
      return static_cast<int64_t>(bytes);
  }
  throw ConfigError("[cli.ckpt] --max-shard-size {} is not a size; write it as 5GB, 500MB or 2GiB", text);
}

/// The dtype named in config.json: the one that all parameters have in the files, else that of training.
std::string dtype_of(const checkpoint::Source& weights, const std::vector<std::string>& names,
                     const std::string& asked_for) {
  std::set<std::string> dtypes;
  for (const std::string& name : names)
    dtypes.insert(asked_for.empty() ? weights.tensors().at(name).dtype : asked_for);
  for (const DtypeWords& dtype : kDtypes) {
    if (dtypes == std::set<std::string>{dtype.stored}) return dtype.theirs;
  }
  return "float32";
}

/// Ids that text begins and ends with, which weights do not say.
void carry_tokens(const std::string& from, Json& config) {
  if (from.empty() || !fs::exists(from + "/" + checkpoint::kModelConfigName)) return;
  const nlohmann::json theirs = checkpoint::read_model_config(from);
  for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    if (theirs.contains(key)) config[key] = theirs[key];
  }
}

/// Logs the files that transformers finds beside the weights, and those that are missing.
void tell_carried(const FoundWeights& found, const checkpoint::CarriedFiles& carried,
                  const std::string& out) {
  constexpr const char* kAdvice = "copy one with --tokenizer FOLDER";
  const std::string& from = found.came_with;
  if (from.empty() && found.lost.empty()) {
    log_warning("{} has no tokenizer, because these weights did not come from a Hugging Face folder; {}", out,
                kAdvice);
  } else if (from.empty()) {
    log_warning("{} has no tokenizer, because {}, which the run started from, no longer exists; {}", out,
                found.lost, kAdvice);
  } else if (!carried.make_tokenizer()) {
    log_warning("{} has no tokenizer, because {} has no {}; {}", out, from, join(carried.missing, ", "),
                kAdvice);
  } else {
    log_info("copied {} from {}{}{}", join(carried.there, ", "), from,
             carried.missing.empty() ? "" : ", which has no ", join(carried.missing, ", "));
  }
}

int export_hf(const ExportOptions& options, const Front& front) {
  const std::string dtype = stored_dtype(options.dtype);
  const int64_t max_file_bytes = parse_size(options.max_shard_size);
  FoundWeights found = find_weights(options.weights, options.config, front);
  if (!options.tokenizer.empty()) found.came_with = options.tokenizer;
  const auto weights = checkpoint::open_source(found.path);
  const plan::ModelFacts facts = plan::describe(found.model, found.model.max_seq_len);
  checkpoint::check_fit(*weights, facts);
  const std::vector<std::string> names = checkpoint::parameter_names(facts);
  Json config = plan::to_hugging_face(found.model, dtype_of(*weights, names, dtype));
  carry_tokens(found.came_with, config);
  if (options.force) check_replaceable(options.out, checkpoint::kModelConfigName);
  checkpoint::NewFolder out(options.out, options.force);
  checkpoint::write_model_files(out.folder(), *weights, names,
                                {.dtype = dtype, .max_file_bytes = max_file_bytes});
  out.folder().write_file(checkpoint::kModelConfigName, config.dump(2) + "\n");
  checkpoint::CarriedFiles carried;
  if (!found.came_with.empty()) carried = checkpoint::carried_files(found.came_with);
  for (const std::string& name : carried.there) checkpoint::carry_file(found.came_with, name, out.folder());
  out.commit();
  tell_carried(found, carried, options.out);
  if (options.json) {
    fmt::print("{}\n", Json{{"schema", "trireme.ckpt.export-hf/1"},
                            {"from", found.path},
                            {"to", options.out},
                            {"tensors", names.size()},
                            {"carried_from", found.came_with.empty() ? Json() : Json(found.came_with)},
                            {"carried", carried.there},
                            {"not_there", carried.missing}}
                           .dump(2));
  } else {
    fmt::print("{}\n", options.out);
  }
  return 0;
}

CLI::App* add_verb(CLI::App& ckpt, Front& front, const char* name, const char* text,
                   std::function<int()> action) {
  CLI::App* verb = ckpt.add_subcommand(name, text);
  add_run_dir(*verb, front);
  verb->callback([&front, action = std::move(action)] { front.action = action; });
  return verb;
}

void add_import(CLI::App& ckpt, Front& front) {
  auto options = std::make_shared<ImportOptions>();
  CLI::App* verb = add_verb(ckpt, front, "import-hf", "Make a run from a Hugging Face folder (Llama, GPT-2)",
                            [options, &front] { return import_hf(*options, front); });
  verb->add_option("FOLDER", options->folder, "Folder with config.json and safetensors files")
      ->required()
      ->option_text(" ");
  verb->add_option("--name", options->name, "Name of the run (default: that of the folder)")
      ->option_text("NAME");
  verb->add_option("--ignore", options->ignored, "Keys of config.json to ignore")->option_text("KEY...");
  verb->add_flag("--drop-extra", options->drop_extra, "Drop tensors that the model does not have");
  verb->add_flag("--json", options->json, "Print one JSON document");
}

void add_export(CLI::App& ckpt, Front& front) {
  auto options = std::make_shared<ExportOptions>();
  CLI::App* verb =
      add_verb(ckpt, front, "export-hf", "Write a folder that Hugging Face transformers can load",
               [options, &front] { return export_hf(*options, front); });
  verb->add_option("WEIGHTS", options->weights, "Run or checkpoint; with --config, any source of weights")
      ->required()
      ->option_text(" ");
  verb->add_option("OUT", options->out, "Folder to create")->required()->option_text(" ");
  verb->add_option("--dtype", options->dtype, "fp32, bf16 or fp16 (default: unchanged)")
      ->option_text("DTYPE");
  verb->add_option("--max-shard-size", options->max_shard_size, "Largest size of a file (default: 5GB)")
      ->option_text("SIZE");
  verb->add_option("--tokenizer", options->tokenizer, "Folder whose tokenizer files are copied")
      ->option_text("FOLDER");
  verb->add_option("--config", options->config, "YAML config of the model")->option_text("FILE");
  verb->add_flag("--force", options->force, "Replace OUT if it is empty or an earlier export");
  verb->add_flag("--json", options->json, "Print one JSON document");
}

}  // namespace

void add_hugging_face(CLI::App& ckpt, Front& front) {
  add_import(ckpt, front);
  add_export(ckpt, front);
}

}  // namespace trireme::cli
