#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/cli/data_path.h"
#include "trireme/cli/front.h"
#include "trireme/cli/train_job.h"
#include "trireme/plan/config.h"
#include "trireme/plan/deepspeed.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;

struct ShowOptions {
  std::string path;
  DeepSpeedOptions deepspeed;
  std::optional<int64_t> ranks;
  bool origin = false;
  bool json = false;
};

Json json_of(const plan::Field& field) {
  return std::visit([](const auto& value) { return Json(value); }, plan::value_of(field));
}

/// The node of "train.steps" inside nested objects.
Json& node_of(Json& root, const std::string& key) {
  const size_t dot = key.find('.');
  return dot == std::string::npos ? root[key] : root[key.substr(0, dot)][key.substr(dot + 1)];
}

void print_show_json(plan::ResolvedConfig resolved, bool origin) {
  Json values = Json::object();
  for (const plan::Field& field : plan::fields(resolved.config)) {
    const Json value = json_of(field);
    node_of(values, field.key) =
        origin ? Json{{"value", value}, {"origin", resolved.origins.at(field.key)}} : value;
  }
  fmt::print("{}\n", Json{{"schema", "trireme.config/1"}, {"config", values}}.dump(2));
}

plan::DeepSpeedFile named_file(const std::string& path, std::optional<int64_t> ranks) {
  return {.path = path, .text = "", .ranks = [ranks](const plan::Config&) { return ranks; }};
}

plan::ResolvedConfig load_shown(ShowOptions options, bool flag, const Front& front) {
  const std::string file = deepspeed_file(options.deepspeed, flag, options.path);
  const plan::ConfigSources sources{.path = options.path, .text = "", .overrides = front.overrides};
  if (!file.empty()) return plan::load(sources, named_file(file, options.ranks), front.environment);
  if (options.ranks) {
    throw UsageError("[cli.config] -n has no effect without --deepspeed_config",
                     "remove it; 'trireme train --dry-run' plans for a number of ranks");
  }
  return plan::load(sources, front.environment);
}

int show(const ShowOptions& options, bool flag, const Front& front) {
  plan::ResolvedConfig resolved = load_shown(options, flag, front);
  settle_tokenizer_if_any(resolved, options.path);
  say_notes(resolved);
  if (options.json) {
    print_show_json(resolved, options.origin);
  } else {
    fmt::print("{}", plan::to_yaml(resolved, options.origin));
  }
  return 0;
}

Json key_row(const plan::Field& field) {
  Json row = {{"key", field.key},
              {"type", plan::type_name(field)},
              {"default", json_of(field)},
              {"help", field.help}};
  if (!field.choices.empty()) row["choices"] = field.choices;
  if (field.min) row["min"] = *field.min;
  if (field.max) row["max"] = *field.max;
  return row;
}

int keys(const std::string& word, bool json) {
  plan::Config defaults;
  const std::vector<plan::Field> table = plan::fields_named(plan::fields(defaults), word);
  if (table.empty()) {
    throw UsageError(fmt::format("[cli.config] no key has '{}' in its name", word),
                     "'trireme config keys' lists all of them");
  }
  if (!json) {
    fmt::print("{}", plan::describe_fields(table));
    return 0;
  }
  Json rows = Json::array();
  for (const plan::Field& field : table) rows.push_back(key_row(field));
  fmt::print("{}\n", Json{{"schema", "trireme.keys/1"}, {"keys", rows}}.dump(2));
  return 0;
}

int schema() {
  const std::string text = plan::json_schema();
  fmt::print("{}{}", text, text.ends_with('\n') ? "" : "\n");
  return 0;
}

struct FromDeepSpeedOptions {
  std::string path;
  std::optional<int64_t> ranks;
  bool keys = false, json = false;
};

int from_deepspeed(const FromDeepSpeedOptions& options) {
  if (options.keys) {
    fmt::print("{}", plan::describe_deepspeed_keys());
    return 0;
  }
  if (options.path.empty())
    throw UsageError("[cli.config] from-deepspeed needs a file", "give DeepSpeed's JSON");
  const plan::DeepSpeedConfig config = plan::read_deepspeed(named_file(options.path, options.ranks), {});
  if (!options.json) {
    fmt::print("{}", plan::to_yaml(config));
    return 0;
  }
  Json settings = Json::array();
  for (const plan::DeepSpeedSetting& setting : config.settings)
    settings.push_back({{"key", setting.key}, {"value", setting.value}, {"origin", setting.why}});
  fmt::print(
      "{}\n",
      Json{{"schema", "trireme.deepspeed/1"}, {"settings", settings}, {"notes", config.notes}}.dump(2));
  return 0;
}

void add_ranks(CLI::App& verb, std::optional<int64_t>& ranks) {
  verb.add_option("-n,--ranks", ranks,
                  "Ranks of the run, where DeepSpeed's file makes the micro-batch depend on them")
      ->option_text("RANKS")
      ->check(CLI::Range(1, 1'000'000));
}

void add_from_deepspeed(CLI::App& verb, Front& front) {
  auto options = std::make_shared<FromDeepSpeedOptions>();
  CLI::App* from =
      verb.add_subcommand("from-deepspeed", "Print what a JSON config of DeepSpeed becomes, as YAML");
  CLI::Option* const file =
      from->add_option("FILE", options->path, "DeepSpeed's JSON config")->option_text(" ");
  add_ranks(*from, options->ranks);
  from->add_flag("--keys", options->keys, "Print the table of all keys instead, in Markdown")->excludes(file);
  from->add_flag("--json", options->json, "Print one JSON document");
  from->callback([options, &front] { front.action = [options] { return from_deepspeed(*options); }; });
}

void add_show(CLI::App& verb, Front& front) {
  auto options = std::make_shared<ShowOptions>();
  CLI::App* show_verb = verb.add_subcommand("show", "Print the resolved config as YAML");
  add_config_file(*show_verb, options->path);
  CLI::Option* const flag = add_deepspeed(*show_verb, options->deepspeed);
  add_ranks(*show_verb, options->ranks);
  show_verb->add_flag("--origin", options->origin, "Show where each value came from");
  show_verb->add_flag("--json", options->json, "Print one JSON document");
  show_verb->footer("Any config key can be given as --section.key=value.");
  show_verb->callback([options, flag, &front] {
    front.action = [options, flag, &front] { return show(*options, flag->count() > 0, front); };
  });
}

void add_schema(CLI::App& verb, Front& front) {
  auto json = std::make_shared<bool>(false);
  CLI::App* schema_verb = verb.add_subcommand("schema", "Print the JSON schema of config files, for editors");
  schema_verb->add_flag("--json", *json, "Accepted, but has no effect: the schema is JSON already");
  schema_verb->callback([json, &front] { front.action = schema; });
}

void add_keys(CLI::App& verb, Front& front) {
  struct KeysOptions {
    std::string word;
    bool json = false;
  };
  auto options = std::make_shared<KeysOptions>();
  CLI::App* keys_verb = verb.add_subcommand("keys", "List keys with their type, default, range and meaning");
  keys_verb->add_option("WORD", options->word, "Only keys with this in their names, such as optim or steps")
      ->option_text(" ");
  keys_verb->add_flag("--json", options->json, "Print one JSON document");
  keys_verb->callback(
      [options, &front] { front.action = [options] { return keys(options->word, options->json); }; });
}

}  // namespace

void add_config(CLI::App& app, Front& front) {
  CLI::App* verb = app.add_subcommand("config", "Show the resolved config, its schema and its keys");
  verb->require_subcommand(1);
  add_show(*verb, front);
  add_schema(*verb, front);
  add_keys(*verb, front);
  add_from_deepspeed(*verb, front);
}

}  // namespace trireme::cli
