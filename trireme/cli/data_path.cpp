#include "trireme/cli/data_path.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/checkpoint/model_folder.h"
#include "trireme/cli/request.h"
#include "trireme/data/source.h"
#include "trireme/plan/config_files.h"
#include "trireme/plan/pipeline.h"
#include "trireme/report/run_dir.h"
#include "trireme/text/chat_template_file.h"
#include "trireme/text/load.h"

namespace trireme::cli {
namespace {

namespace fs = std::filesystem;

const char* fix_of(bool images) {
  return images
             ? "set data.path to a folder of images (such as from 'trireme data get cifar10'), or 'builtin'"
             : "set data.path to a text file, a folder of them, or 'builtin'";
}

/// The fix for a path that is meant from the folder of the config file, else empty.
std::string beside_config(const fs::path& path, const std::string& config_file) {
  std::error_code ignored;
  if (config_file.empty() || path.is_absolute()) return "";
  const fs::path there = fs::absolute(fs::path(config_file).parent_path() / path).lexically_normal();
  return fs::exists(there, ignored)
             ? fmt::format("; did you mean {}, beside the config file?", there.string())
             : "";
}

bool holds_files(const fs::path& folder) {
  std::error_code ignored;
  const auto shown = [](const fs::directory_entry& entry) {
    return !entry.path().filename().string().starts_with(".");
  };
  return std::any_of(fs::directory_iterator(folder, ignored), fs::directory_iterator(), shown);
}

/// Data that is no file of the user.
bool needs_no_path(const plan::Config& config) {
  return config.data.path == "builtin" || config.data.path == plan::kProgramData;
}

/// Throws for data that are no file, and so no JSON Lines.
void check_is_text(plan::DataFormat format, const std::string& key, const std::string& path) {
  if (format == plan::DataFormat::kText) return;
  throw ConfigError(
      "[cli.data] data.format={} reads JSON Lines, but {} is {}, which is none; set {} to a *.jsonl file",
      format, key, path, key);
}

/// settle_data_path() of one of the config's paths. `key` is its name in messages.
void settle_path(std::string& value, const std::string& key, bool images, const std::string& config_file) {
  const char* const fix = fix_of(images);
  if (value.empty()) throw ConfigError("[cli.data] {} is empty; {}", key, fix);
  const auto [named, field] = images ? data::TextPath{value, ""} : data::parse_text_path(value);
  if (named.empty()) {
    throw ConfigError("[cli.data] {}={} names a field of JSON Lines, but no file before the #; {}", key,
                      value, fix);
  }
  const fs::path given = named;
  const fs::path path = fs::absolute(given).lexically_normal();
  std::error_code ignored;
  const fs::file_status status = fs::status(path, ignored);
  const bool folder = fs::is_directory(status);
  if (!fs::exists(status)) {
    throw ConfigError("[cli.data] {}={}: {} does not exist{}; {}", key, given.string(), path.string(),
                      beside_config(given, config_file), fix);
  }
  if (::access(path.c_str(), folder ? R_OK | X_OK : R_OK) != 0) {
    throw ConfigError("[cli.data] {}={}: {} cannot be read: {}; {}", key, given.string(), path.string(),
                      errno_text(errno), fix);
  }
  if (!folder && !fs::is_regular_file(status)) {
    throw ConfigError("[cli.data] {}={}: {} is neither a file nor a folder; {}", key, given.string(),
                      path.string(), fix);
  }
  if (images && !folder) {
    throw ConfigError("[cli.data] {}={}: {} is a file, but images are read from folders; {}", key,
                      given.string(), path.string(), fix);
  }
  if (folder ? !holds_files(path) : fs::file_size(path, ignored) == 0) {
    throw ConfigError("[cli.data] {}={}: {} has no {}; {}", key, given.string(), path.string(),
                      images ? "images" : "text", fix);
  }
  value = path.string() + (field.empty() ? "" : "#" + field);
}

}  // namespace

void check_program_data(const plan::Config& config, const Environment& environment) {
  if (config.data.path != plan::kProgramData || environment.get(kProgramVariable)) return;
  throw ConfigError(
      "[cli.data] data.path={0} stands for the data of a program of your own, which only that program has; "
      "start "
      "it with the same words instead of 'trireme train', or write ./{0} for a file or folder of that name",
      plan::kProgramData);
}

void settle_data_path(plan::Config& config, const std::string& config_file) {
  for (plan::MixtureSource& source : config.data.mixture.sources) {
    const std::string key = fmt::format("data.mixture.{}.path", source.name);
    if (source.path == "builtin") {
      check_is_text(config.data.format, key, source.path);
    } else {
      settle_path(source.path, key, false, config_file);
    }
  }
  if (!config.data.mixture.sources.empty()) return;
  if (needs_no_path(config)) return check_is_text(config.data.format, "data.path", config.data.path);
  settle_path(config.data.path, "data.path", plan::reads_images(config.model.family), config_file);
}

void check_texts(const plan::Config& config) {
  for (const plan::MixtureSource& source : config.data.mixture.sources) {
    if (source.path != "builtin") data::list_source(source.path);
  }
  if (!needs_no_path(config) && !plan::reads_images(config.model.family)) data::list_source(config.data.path);
}

namespace {

/// Whether the tokenizer is a file or folder; no model of images has one.
bool has_tokenizer_file(const plan::Config& config) {
  return config.data.tokenizer != plan::kByteTokenizer && !plan::reads_images(config.model.family);
}

/// Makes data.chat_template absolute, and reads the template, so that what it lacks is said before ranks
/// start.
void settle_chat_template(plan::Config& config, const std::string& config_file) {
  if (config.data.format != plan::DataFormat::kChat) return;
  std::string& file = config.data.chat_template;
  if (!file.empty()) {
    const fs::path given = file, path = fs::absolute(given).lexically_normal();
    std::error_code ignored;
    if (!fs::exists(path, ignored))
      throw ConfigError(
          "[cli.data] data.chat_template={}: {} does not exist{}; name a file with a Jinja template", file,
          path.string(), beside_config(given, config_file));
    file = path.string();
  }
  text::load_chat_template(file, config.data.tokenizer);
}

}  // namespace

void settle_tokenizer_if_any(plan::ResolvedConfig& resolved, const std::string& config_file) {
  plan::Config& config = resolved.config;
  std::string& tokenizer = config.data.tokenizer;
  std::error_code ignored;
  if (!has_tokenizer_file(config) || tokenizer.empty() || fs::exists(tokenizer, ignored))
    return settle_tokenizer(resolved, config_file);
  const fs::path given = tokenizer, path = fs::absolute(given).lexically_normal();
  resolved.notes.push_back(
      fmt::format("data.tokenizer={} does not exist{}; once it does, model.vocab_size ({}) may follow it",
                  path.string(), beside_config(given, config_file), config.model.vocab_size));
  tokenizer = path.string();
}

void settle_tokenizer(plan::ResolvedConfig& resolved, const std::string& config_file) {
  plan::Config& config = resolved.config;
  std::string& tokenizer = config.data.tokenizer;
  settle_chat_template(config, config_file);
  if (!has_tokenizer_file(config)) return;
  constexpr const char* kFix =
      "set it to 'byte', a tokenizer.json, a SentencePiece .model, a published .tiktoken, or a folder with a "
      "tokenizer";
  if (tokenizer.empty()) throw ConfigError("[cli.data] data.tokenizer is empty; {}", kFix);
  const fs::path given = tokenizer, path = fs::absolute(given).lexically_normal();
  std::error_code ignored;
  if (!fs::exists(path, ignored)) {
    throw ConfigError("[cli.data] data.tokenizer={}: {} does not exist{}; {}", tokenizer, path.string(),
                      beside_config(given, config_file), kFix);
  }
  tokenizer = path.string();
  const text::Tokenizer loaded = text::load_tokenizer(tokenizer);
  text::end_token(loaded);  // which must be there, to separate documents
  std::vector<int32_t> ids;
  text::Encoder(loaded).encode("a", ids);  // refuses what this build has no library for, before ranks start
  std::string& origin = resolved.origins.at("model.vocab_size");
  const bool of_preset = origin.starts_with("preset"), fits = config.model.vocab_size >= loaded.vocab_size();
  if (origin == "default" || (of_preset && !fits)) {
    if (of_preset) {
      resolved.notes.push_back(
          fmt::format("model.vocab_size={} ({}) becomes {}, the tokens of data.tokenizer",
                      config.model.vocab_size, origin, loaded.vocab_size()));
    }
    config.model.vocab_size = loaded.vocab_size();
    origin = "derived: data.tokenizer";
  } else if (!fits) {
    throw ConfigError(
        "[cli.data] model.vocab_size={} ({}) is too small for data.tokenizer={}, which makes {} tokens; set "
        "model.vocab_size to {} or more",
        config.model.vocab_size, origin, tokenizer, with_commas(loaded.vocab_size()), loaded.vocab_size());
  }
}

std::string why_no_tokenizer(const std::string& folder, const plan::ModelConfig& model) {
  if (!checkpoint::carried_files(folder).make_tokenizer())
    return "there is no tokenizer.json, no tokenizer.model and not both vocab.json and merges.txt";
  try {
    const text::Tokenizer tokenizer = text::load_tokenizer(folder);
    text::end_token(tokenizer);  // which must be there, to separate documents
    std::vector<int32_t> ids;
    text::Encoder(tokenizer).encode("a", ids);  // needs all libraries that it asks for
    if (tokenizer.vocab_size() <= model.vocab_size) return {};
    return fmt::format("its {} tokens are more than the model's {}", with_commas(tokenizer.vocab_size()),
                       with_commas(model.vocab_size));
  } catch (const Error& error) {
    return error.what();
  }
}

void check_cache_folder(const plan::Config& config, const Environment& environment) {
  if (config.data.path == plan::kProgramData) return;
  if (plan::reads_images(config.model.family) && config.data.path != "builtin") return;
  const std::string folder = cache_dir(environment) + "/data";
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  // The data prepared there may be all that this run needs.
  const bool has_data = !error && !std::filesystem::is_empty(folder, error);
  if (!error && (has_data || ::access(folder.c_str(), W_OK) == 0)) return;
  throw EnvironmentError(
      "[cli.train] prepared data is kept in {}, where this user cannot write{}; set XDG_CACHE_HOME to a "
      "folder "
      "that is writable",
      folder, error ? fmt::format(" ({})", error.message()) : std::string());
}

bool use_copy_of_changed(const plan::ConfigFile& kept, plan::Config& config, const std::string& copy,
                         const std::string& text) {
  std::string& file = kept.path(config);
  std::string there;
  try {
    there = kept.text(config);
  } catch (const ConfigError&) {
    there.clear();  // another one, too
  }
  if (there == text) return false;
  log_info("{} {} has changed since the run began; using the run's copy {}", kept.key, file, copy);
  file = copy;
  return true;
}

namespace {

void settle(const plan::ConfigFile& kept, plan::ResolvedConfig& resolved, const std::string& config_file) {
  std::string& file = kept.path(resolved.config);
  if (file.empty()) return;
  file = fs::absolute(file).lexically_normal().string();
  if (config_file.empty()) return;
  const fs::path folder = fs::absolute(config_file).parent_path(),
                 copy = (folder / kept.kept_as).lexically_normal();
  const bool from_run = fs::exists(folder / "manifest.json") && fs::exists(copy) &&
                        resolved.origins.at(kept.key).starts_with(config_file + ":");
  if (from_run) use_copy_of_changed(kept, resolved.config, copy.string(), read_file(copy.string()));
}

}  // namespace

void settle_kept_files(plan::ResolvedConfig& resolved, const std::string& config_file) {
  for (const plan::ConfigFile& file : plan::config_files()) settle(file, resolved, config_file);
}

}  // namespace trireme::cli
