#include "trireme/cli/arguments.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <map>
#include <set>
#include <string_view>

#include "trireme/base/text.h"
#include "trireme/plan/config.h"
#include "trireme/plan/config_aliases.h"
#include "trireme/plan/gpus.h"

namespace trireme::cli {
namespace {

/// Every config key, and whether it is a boolean.
std::map<std::string, bool> config_keys() {
  std::map<std::string, bool> keys;
  plan::Config config;
  for (const plan::Field& field : plan::fields(config)) {
    keys.emplace(field.key, std::holds_alternative<bool*>(field.value));
  }
  return keys;
}

/// A verb that takes config keys.
struct ConfigVerb {
  std::string_view name;
  std::vector<std::string_view> reads = {};  ///< keys, and sections with a dot at the end; empty: all
  std::vector<std::string_view> but = {};    ///< keys of these sections that it does not read
};

const std::vector<ConfigVerb>& config_verbs() {
  static const std::vector<ConfigVerb> verbs = {
      {"train"},
      {"sweep"},
      {"find-lr"},
      {"bench memory"},
      {"bench run"},
      {"bench speed"},
      {"bench pipeline",
       {"device", "seed", "model.", "data.seq_len", "parallel.", "pipeline.spread_head", "precision.compute",
        "precision.reduce", "precision.accumulate", "memory.", "comm."},
       {"model.weights", "parallel.bucket_mib", "parallel.pp"}},
      {"config show"},
      {"data inspect",
       {"data.tokenizer", "data.seq_len", "data.format", "data.loss_on", "data.chat_template"}},
      {"pipeline stages"},
      {"plan step"},
      {"plan time"},
      {"plan mesh"},
      {"plan placements"},
      {"plan signals"},
      {"lab", {"device", "seed", "comm.timeout_s", "comm.peer_memory", "comm.gather"}}};
  return verbs;
}

bool reads(const ConfigVerb& verb, const std::string& key) {
  const auto is_in = [&key](std::string_view one) {
    return one.ends_with('.') ? key.starts_with(one) : key == one;
  };
  return verb.reads.empty() ||
         (std::ranges::any_of(verb.reads, is_in) && std::ranges::none_of(verb.but, is_in));
}

/// "device, seed, model.*".
std::string keys_read(const ConfigVerb& verb) {
  std::vector<std::string> words;
  for (const std::string_view one : verb.reads)
    words.push_back(fmt::format("{}{}", one, one.ends_with('.') ? "*" : ""));
  return join(words, ", ");
}

/// None where the verb called `name` takes no config keys.
const ConfigVerb* config_verb(std::string_view name) {
  const auto found = std::ranges::find(config_verbs(), name, &ConfigVerb::name);
  return found == config_verbs().end() ? nullptr : &*found;
}

const ConfigVerb* config_verb_of(const std::vector<std::string>& arguments) {
  if (arguments.empty()) return nullptr;
  const auto is_word = [](const std::string& argument) { return !argument.starts_with("-"); };
  const auto second = std::find_if(arguments.begin() + 1, arguments.end(), is_word);
  const ConfigVerb* const verb = config_verb(arguments[0]);
  return verb != nullptr || second == arguments.end() ? verb : config_verb(arguments[0] + " " + *second);
}

/// Throws UsageError for "name=value" that `verb` has no use for. What is no key goes on: the config knows
/// the nearest one.
void check_is_read(const ConfigVerb& verb, const std::map<std::string, bool>& keys, const std::string& name,
                   const std::string& value) {
  for (const plan::Assignment& ours : plan::in_our_keys({.key = name, .text = value, .origin = {}})) {
    if (!keys.contains(ours.key) || reads(verb, ours.key)) continue;
    throw UsageError(fmt::format("[cli.arguments] 'trireme {}' does not read {}", verb.name, name),
                     fmt::format("remove it; the config keys that have an effect are {}", keys_read(verb)));
  }
}

bool is_boolean_word(std::string_view word) {
  constexpr std::string_view kWords[] = {"true", "false", "yes", "no", "on", "off"};
  return std::ranges::find(kWords, word) != std::end(kWords);
}

/// The value of key `name` that starts after argument `index`; `index` moves past it.
std::string following_value(const std::vector<std::string>& arguments, size_t& index, const std::string& name,
                            bool boolean) {
  const bool has_next = index + 1 < arguments.size();
  if (boolean && !(has_next && is_boolean_word(arguments[index + 1]))) return "true";
  if (!has_next || arguments[index + 1].starts_with("--")) {
    throw UsageError(fmt::format("[cli.arguments] --{} has no value", name),
                     fmt::format("write --{}=VALUE; 'trireme config keys' lists the keys", name));
  }
  return arguments[++index];
}

const CLI::App& innermost(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app : innermost(*chosen.front());
}

std::vector<std::string> verb_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* verb : app.get_subcommands({})) names.push_back(verb->get_name());
  return names;
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

/// Names that other trainers have for our keys and options. They are compared as whole words: they lie too
/// near to each other to guess from.
constexpr std::pair<std::string_view, std::string_view> kOtherNames[] = {
    {"accumulate_grad_batches", "train.micro_batch"},
    {"activation_checkpointing", "memory.recompute"},
    {"amp", "precision.compute"},
    {"batch", "train.global_batch"},
    {"batch_size", "train.global_batch"},
    {"batch_size", "train.micro_batch"},
    {"bf16", "precision.compute"},
    {"block_size", "data.seq_len"},
    {"clip", "train.grad_clip"},
    {"context_length", "data.seq_len"},
    {"cpu", "device"},
    {"cuda", "device"},
    {"dataset", "data.path"},
    {"ddp", "parallel.policy"},
    {"devices", "ranks"},
    {"dtype", "precision.compute"},
    {"early_stopping", "train.early_stop"},
    {"early_stopping_min_delta", "train.early_stop_min_delta"},
    {"early_stopping_patience", "train.early_stop"},
    {"early_stopping_threshold", "train.early_stop_min_delta"},
    {"eval_every", "train.val_every"},
    {"eval_interval", "train.val_every"},
    {"eval_iters", "train.val_batches"},
    {"eval_steps", "train.val_every"},
    {"fp16", "precision.compute"},
    {"fp8", "precision.fp8"},
    {"fsdp", "parallel.policy"},
    {"gpu", "device"},
    {"gpus", "ranks"},
    {"grad_accum", "train.micro_batch"},
    {"grad_accum_steps", "train.micro_batch"},
    {"gradient_accumulation", "train.micro_batch"},
    {"gradient_accumulation_steps", "train.micro_batch"},
    {"gradient_checkpointing", "memory.recompute"},
    {"hidden_size", "model.d_model"},
    {"iters", "train.steps"},
    {"learning_rate", "optim.lr"},
    {"log_interval", "train.log_every"},
    {"logging_steps", "train.log_every"},
    {"lr_scheduler", "optim.schedule"},
    {"lr_scheduler_type", "optim.schedule"},
    {"max_grad_norm", "train.grad_clip"},
    {"max_iters", "train.steps"},
    {"max_steps", "train.steps"},
    {"micro_batch_size", "train.micro_batch"},
    {"micro_batches", "micro-batch-sizes"},
    {"mixed_precision", "precision.compute"},
    {"model", "model.preset"},
    {"n_embd", "model.d_model"},
    {"n_head", "model.n_heads"},
    {"n_layer", "model.n_layers"},
    {"n_stages", "parallel.pp"},
    {"nproc_per_node", "ranks"},
    {"num_epochs", "train.epochs"},
    {"num_layers", "model.n_layers"},
    {"num_train_epochs", "train.epochs"},
    {"num_workers", "data.threads"},
    {"optimizer", "optim.name"},
    {"out_dir", "run-dir"},
    {"output_dir", "run-dir"},
    {"patience", "train.early_stop"},
    {"per_device_train_batch_size", "train.rank_batch"},
    {"resume_from_checkpoint", "resume"},
    {"save_every", "checkpoint.every"},
    {"save_interval", "checkpoint.every"},
    {"save_steps", "checkpoint.every"},
    {"sequence_length", "data.seq_len"},
    {"stages", "parallel.pp"},
    {"warmup", "optim.warmup_steps"},
    {"world_size", "ranks"},
    {"zero", "parallel.policy"},
};

/// "n_embd" of "--n-embd".
std::string as_name_of_others(const std::string& option) {
  std::string name = option.substr(std::min(option.find_first_not_of('-'), option.size()));
  std::ranges::replace(name, '-', '_');
  return name;
}

/// Options that the unknown `name` may stand for: where there is a config, keys that others call so and keys
/// with this last part ("--steps"); else the nearest option or key.
std::vector<std::string> likely_options(const std::string& name, const CLI::App& verb,
                                        const ConfigVerb* config) {
  const std::vector<std::string> options = option_names(verb);
  std::map<std::string, std::set<std::string>> meanings;
  for (const std::string& option : options) meanings[option] = {option};
  if (config != nullptr) {
    for (const auto& [key, boolean] : config_keys()) {
      if (!reads(*config, key)) continue;
      meanings["--" + key] = {"--" + key};
      const size_t dot = key.find('.');
      if (dot != std::string::npos) meanings["--" + key.substr(dot + 1)].insert("--" + key);
    }
  }
  const std::string word = as_name_of_others(name);
  std::set<std::string> likely;
  for (const auto& [other, ours] : kOtherNames) {
    const std::string option = "--" + std::string(ours);
    if (other == word && meanings.contains(option)) likely.insert(option);
  }
  if (likely.empty()) {
    std::vector<std::string> candidates;
    for (const auto& [candidate, meaning] : meanings) candidates.push_back(candidate);
    const std::string near = meanings.contains("--" + word) ? "--" + word : nearest_name(name, candidates);
    if (!near.empty()) likely = meanings.at(near);
  }
  return {likely.begin(), likely.end()};
}

/// "did you mean 'X'? " or nothing.
std::string suggestion(const std::string& word, const std::vector<std::string>& candidates) {
  const std::string near = nearest_name(word, candidates);
  return near.empty() ? "" : fmt::format("did you mean '{}'? ", near);
}

std::string shell_word(const std::string& word) {
  const auto plain = [](unsigned char letter) {
    return std::isalnum(letter) != 0 ||
           std::string_view("_@%+=:,./-").find(static_cast<char>(letter)) != std::string_view::npos;
  };
  if (!word.empty() && std::ranges::all_of(word, plain)) return word;
  std::string quoted = "'";
  for (const char letter : word) quoted += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
  return quoted + "'";
}

}  // namespace

std::vector<std::string> take_overrides(std::vector<std::string>& arguments) {
  std::vector<std::string> overrides;
  const ConfigVerb* const verb = config_verb_of(arguments);
  if (verb == nullptr) return overrides;
  const std::map<std::string, bool> ours = config_keys();
  std::map<std::string, bool> keys = ours;
  for (const std::string& alias : plan::alias_keys()) keys.emplace(alias, false);
  std::vector<std::string> rest;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const size_t equals = argument.find('=');
    const std::string name = argument.starts_with("--")
                                 ? argument.substr(2, equals == std::string::npos ? equals : equals - 2)
                                 : "";
    const auto key = keys.find(name);
    if (key == keys.end() && name.find('.') == std::string::npos) {
      rest.push_back(argument);
      continue;
    }
    const bool boolean = key != keys.end() && key->second;
    // A dotted name that is no key goes along: the config knows the nearest key.
    const std::string value = equals != std::string::npos ? argument.substr(equals + 1)
                                                          : following_value(arguments, i, name, boolean);
    check_is_read(*verb, ours, name, value);
    overrides.push_back(name + "=" + value);
  }
  arguments = std::move(rest);
  return overrides;
}

void check_verb(const CLI::App& app, const std::vector<std::string>& arguments) {
  if (arguments.empty()) throw UsageError("[cli] no command given", "'trireme --help' lists the commands");
  const std::string& word = arguments.front();
  const std::vector<std::string> names = verb_names(app);
  if (word.starts_with("-") || std::ranges::find(names, word) != names.end()) return;
  throw UsageError(fmt::format("[cli] '{}' is not a command", word),
                   suggestion(word, names) + "'trireme --help' lists the commands");
}

void drop_program_mark(std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0] != "launch") return;
  for (size_t i = 1; i < arguments.size() && arguments[i].starts_with("-");) {
    if (arguments[i] == "--") {
      arguments.erase(arguments.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
    i += arguments[i].find('=') == std::string::npos ? 2 : 1;  // its options take values
  }
}

void keep_empty_words(std::vector<std::string>& arguments) {
  if (arguments.empty() || arguments[0] == "launch") return;
  std::vector<std::string> kept;
  for (std::string& word : arguments) {
    const bool is_empty = word.starts_with("--") && word.find('=') == word.size() - 1;
    if (is_empty) word.pop_back();
    kept.push_back(std::move(word));
    if (is_empty) kept.emplace_back();
  }
  arguments = std::move(kept);
}

void check_leftovers(const CLI::App& app) {
  if (innermost(app).get_prefix_command()) return;  // they are another program's
  const std::vector<std::string> leftovers = app.remaining(true);
  if (leftovers.empty()) return;
  const std::string& word = leftovers.front();
  const CLI::App& verb = innermost(app);
  const std::string help = fmt::format("see '{} --help'", parsed_path(app));
  if (!word.starts_with("-")) {
    throw UsageError(fmt::format("[cli] unexpected argument '{}'", word),
                     suggestion(word, verb_names(verb)) + help);
  }
  const std::string name = word.substr(0, word.find('='));
  const std::string path = parsed_path(app);
  const ConfigVerb* const config = config_verb(path.substr(path.find(' ') + 1));
  const bool is_key = name.starts_with("--") && config_keys().contains(name.substr(2));
  if (is_key && verb_names(verb).empty()) {
    const char* const why = config == nullptr ? "takes no config keys" : "takes config keys behind its name";
    throw UsageError(fmt::format("[cli] unknown option '{}'", name),
                     fmt::format("'{}' {}; {}", path, why, help));
  }
  const std::vector<std::string> likely = likely_options(name, verb, config);
  const std::string meant = likely.empty() ? "" : fmt::format("did you mean '{}'? ", join(likely, "' or '"));
  throw UsageError(fmt::format("[cli] unknown option '{}'", name), meant + help);
}

void add_run_dir(CLI::App& verb, Front& front) {
  verb.add_option_function<std::string>(
          "--run-dir",
          [&front](const std::string& folder) { front.environment.set("TRIREME_RUN_DIR", folder); },
          "Parent of run directories (default: $TRIREME_RUN_DIR, else ./runs)")
      ->option_text("DIR");
}

CLI::Option* add_planned_gpu(CLI::App& verb, std::string& gpu) {
  return verb
      .add_option("--gpu", gpu, "Plan for GPUs of this kind, wherever they are: " + plan::gpu_choices())
      ->option_text("KIND");
}

void add_config_file(CLI::App& verb, std::string& path) {
  CLI::Option* const argument =
      verb.add_option("CONFIG", path, "YAML config file; without one, defaults and overrides apply")
          ->option_text(" ");
  verb.add_option("--config", path, "Same as CONFIG")->option_text("FILE")->excludes(argument);
}

CLI::Option* add_deepspeed(CLI::App& verb, DeepSpeedOptions& options) {
  verb.add_option("--deepspeed_config", options.config,
                  "DeepSpeed's JSON config: its keys count more than CONFIG, less than variables and options")
      ->option_text("FILE");
  CLI::Option* const flag = verb.add_option(
      "--deepspeed", options.word,
      "The same; without FILE it may stand beside --deepspeed_config, as in DeepSpeed's scripts");
  return flag->option_text("[FILE]")->expected(0, 1);
}

std::string deepspeed_file(const DeepSpeedOptions& options, bool flag, std::string& config) {
  if (flag && options.word.empty() && options.config.empty()) {
    throw UsageError("[cli.arguments] --deepspeed names no file", "write --deepspeed FILE.json");
  }
  if (options.config.empty()) return options.word;
  if (options.word.empty()) return options.config;
  if (!config.empty()) {
    throw UsageError(fmt::format("[cli.arguments] --deepspeed {} and --deepspeed_config {} are two files",
                                 options.word, options.config),
                     "remove one of them");
  }
  config = options.word;
  return options.config;
}

std::string shell_line(const std::vector<std::string>& words) {
  std::vector<std::string> quoted;
  for (const std::string& word : words) quoted.push_back(shell_word(word));
  return join(quoted, " ");
}

std::string parsed_path(const CLI::App& app) {
  std::string path = app.get_name();
  for (const CLI::App* verb : app.get_subcommands()) path += " " + parsed_path(*verb);
  return path;
}

}  // namespace trireme::cli
