#include "trireme/cli/bench_words.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/text.h"

namespace trireme::cli {
namespace {

/// Flags that are keys.
constexpr std::pair<std::string_view, std::string_view> kKeyFlags[] = {
    {"--sequence-length", "data.seq_len"},     {"--seq-length", "data.seq_len"},
    {"--max-length", "data.seq_len"},          {"--hidden-size", "model.d_model"},
    {"--hidden-dim", "model.d_model"},         {"--num-layers", "model.n_layers"},
    {"--learning-rate", "optim.lr"},           {"--seed", "seed"},
    {"--bucket-cap-mb", "parallel.bucket_mib"}};

/// The other ones that words_of() knows.
constexpr std::string_view kOwnFlags[] = {"--steps",      "--micro-batch-size", "--batch-size",
                                          "--grad-accum", "--n-stages",         "--micro-batch-target",
                                          "--mode",       "--summary"};

/// Words as a shell splits them: blanks part them but for those in quotes.
std::vector<std::string> shell_split(const std::string& text) {
  std::vector<std::string> words;
  std::string word;
  bool open = false;
  char quote = 0;
  for (const char letter : text) {
    if (quote != 0) {
      if (letter == quote)
        quote = 0;
      else
        word += letter;
    } else if (letter == '"' || letter == '\'') {
      quote = letter;
      open = true;
    } else if (letter == ' ' || letter == '\t' || letter == '\n') {
      if (open) words.push_back(std::exchange(word, ""));
      open = false;
    } else {
      word += letter;
      open = true;
    }
  }
  if (quote != 0) throw ConfigError("[cli.bench] {} has a quote {} that does not end; close it", text, quote);
  if (open) words.push_back(word);
  return words;
}

/// A flag and its value: "--flag=value", "--flag value", or "--flag" alone.
struct Flag {
  std::string name, value = {};
  bool has_value = false;
};

std::vector<Flag> flags_in(const std::string& text) {
  std::vector<Flag> flags;
  for (const std::string& word : shell_split(text)) {
    const size_t equals = word.find('=');
    if (word.starts_with("-") && equals != std::string::npos) {
      flags.push_back({.name = word.substr(0, equals), .value = word.substr(equals + 1), .has_value = true});
    } else if (word.starts_with("--")) {
      flags.push_back({.name = word});
    } else if (!flags.empty() && !flags.back().has_value) {
      flags.back() = {.name = flags.back().name, .value = word, .has_value = true};
    } else {
      throw ConfigError("[cli.bench] '{}' belongs to no flag in '{}'; write --flag value", word, text);
    }
  }
  return flags;
}

int64_t count_of(const Flag& flag) {
  int64_t count = 0;
  const char* const end = flag.value.data() + flag.value.size();
  const auto [stop, error] = std::from_chars(flag.value.data(), end, count);
  if (error != std::errc() || stop != end || count < 1)
    throw ConfigError("[cli.bench] {} is '{}', but must be a whole number from 1", flag.name, flag.value);
  return count;
}

void need_value(const Flag& flag) {
  if (!flag.has_value || flag.value.empty())
    throw ConfigError("[cli.bench] {} has no value; write {} VALUE", flag.name, flag.name);
}

[[noreturn]] void refuse_flag(const Flag& flag, const bench::Target& target) {
  if (flag.name == "--dual-window")
    throw ConfigError(
        "[cli.bench] --dual-window has no key in a training run; 'trireme lab {} --dual-window N' "
        "measures windows on a toy model",
        target.pipelined ? target.name : "pipeline_dualpipe");
  std::vector<std::string> known(std::begin(kOwnFlags), std::end(kOwnFlags));
  for (const auto& [name, key] : kKeyFlags) known.emplace_back(name);
  const std::string near = nearest_name(flag.name, known);
  throw ConfigError("[cli.bench] {} takes no flag {}; {}flags are {}, and every --section.key", target.name,
                    flag.name, near.empty() ? "" : fmt::format("did you mean {}? ", near), join(known, ", "));
}

void need_pipeline(const Flag& flag, const bench::Target& target) {
  if (target.pipelined) return;
  throw ConfigError("[cli.bench] {} is of pipelines, but {} is none; remove it", flag.name, target.name);
}

void take_mode(const Flag& flag, TargetWords& words) {
  need_value(flag);
  if (flag.value == "declared" || flag.value == "documents") {
    words.mode = flag.value;
  } else if (flag.value == "baseline" || flag.value == "optimized") {
    words.mode = "documents";
    words.only = flag.value;
  } else if (flag.value == "both") {
    words.mode = "documents";
  } else {
    throw ConfigError(
        "[cli.bench] --mode is '{}'; choose declared, documents (or both), baseline or optimized",
        flag.value);
  }
}

void take_batch(const Flag& flag, const bench::Target& target, TargetWords& words) {
  need_value(flag);
  if (flag.name == "--batch-size") {
    words.keys.push_back((target.pipelined ? "train.global_batch=" : "train.rank_batch=") + flag.value);
  } else if (target.pipelined) {
    words.last_micro_batch_size = count_of(flag);
  } else {
    words.keys.push_back("train.micro_batch=" + flag.value);
  }
}

/// Flags that are no keys.
void take_own(const Flag& flag, const bench::Target& target, TargetWords& words) {
  if (flag.name == "--summary") {
    if (flag.has_value) throw ConfigError("[cli.bench] --summary takes no value, but has '{}'", flag.value);
    words.summary = true;
  } else if (flag.name == "--mode") {
    take_mode(flag, words);
  } else if (flag.name == "--steps") {
    words.steps = count_of(flag);
  } else if (flag.name == "--grad-accum") {
    words.accumulation = count_of(flag);
  } else if (flag.name == "--batch-size" || flag.name == "--micro-batch-size") {
    take_batch(flag, target, words);
  } else if (flag.name == "--n-stages") {
    need_pipeline(flag, target);
    words.ranks = count_of(flag);
  } else if (flag.name == "--micro-batch-target") {
    need_pipeline(flag, target);
    words.last_micro_batches = count_of(flag);
  } else {
    refuse_flag(flag, target);
  }
}

void append(TargetWords& words, TargetWords more) {
  words.keys.insert(words.keys.end(), more.keys.begin(), more.keys.end());
  if (!more.mode.empty()) words.mode = more.mode;
  if (!more.only.empty()) words.only = more.only;
  words.summary |= more.summary;
  for (const auto member : {&TargetWords::steps, &TargetWords::ranks, &TargetWords::accumulation,
                            &TargetWords::last_micro_batches, &TargetWords::last_micro_batch_size}) {
    if (more.*member) words.*member = more.*member;
  }
}

/// Variables that tell a rank who it is.
constexpr std::string_view kOfLauncher[] = {"RANK",        "WORLD_SIZE",  "LOCAL_RANK",
                                            "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"};

std::string variable_of(const std::string& word, const Environment& environment) {
  const size_t equals = word.find('=');
  const std::string name = word.substr(0, equals);
  if (name.empty())
    throw ConfigError("[cli.bench] --torchrun-env '{}' names no variable; write KEY=VALUE", word);
  if (std::ranges::find(kOfLauncher, name) != std::end(kOfLauncher) || name.starts_with("TRIREME_"))
    throw ConfigError("[cli.bench] --torchrun-env {}: the launcher sets {} itself; remove it", word, name);
  if (equals != std::string::npos) return word;
  const auto value = environment.get(name);
  if (!value)
    throw ConfigError("[cli.bench] --torchrun-env {}: there is no such variable; write {}=VALUE", word, name);
  return name + "=" + *value;
}

/// TORCHRUN_ARGS has underlines or dashes inside of names.
void take_launcher_flag(Flag flag, LaunchWords& words) {
  std::ranges::replace(flag.name, '_', '-');
  if (flag.name == "--standalone" && !flag.has_value) return;  // all runs are
  if (flag.name == "--nproc-per-node") {
    words.ranks = count_of(flag);
  } else if (flag.name != "--nnodes" || flag.value != "1") {
    throw ConfigError(
        "[cli.bench] TORCHRUN_ARGS has {}{}, which a bench on one host cannot honour: it takes "
        "--nproc_per_node N, --nnodes 1 and --standalone; remove it, or unset TORCHRUN_ARGS",
        flag.name, flag.has_value ? " " + flag.value : "");
  }
}

}  // namespace

TargetWords words_of(const bench::Target& target, const std::string& text) {
  TargetWords words;
  for (const Flag& flag : flags_in(text)) {
    const auto key =
        std::ranges::find(kKeyFlags, flag.name, &std::pair<std::string_view, std::string_view>::first);
    if (key != std::end(kKeyFlags)) {
      need_value(flag);
      words.keys.push_back(fmt::format("{}={}", key->second, flag.value));
    } else if (flag.name.starts_with("--") && flag.name.find('.') != std::string::npos) {
      words.keys.push_back(fmt::format("{}={}", flag.name.substr(2), flag.has_value ? flag.value : "true"));
    } else {
      take_own(flag, target, words);
    }
  }
  return words;
}

std::map<const bench::Target*, TargetWords> extra_words(const std::vector<std::string>& arguments,
                                                        const std::vector<bench::Choice>& chosen) {
  std::map<const bench::Target*, TargetWords> words;
  for (const std::string& argument : arguments) {
    const size_t equals = argument.find('=');
    if (equals == std::string::npos || equals == 0)
      throw ConfigError("[cli.bench] --target-extra-arg {} names no target; write TARGET=\"--flag value\"",
                        argument);
    std::string flags = argument.substr(equals + 1);
    if (flags.size() >= 2 && flags.front() == flags.back() && (flags.front() == '"' || flags.front() == '\''))
      flags = flags.substr(1, flags.size() - 2);
    for (const bench::Choice& named : bench::find_targets(argument.substr(0, equals))) {
      if (std::ranges::find(chosen, named.target, &bench::Choice::target) == chosen.end())
        throw ConfigError(
            "[cli.bench] --target-extra-arg is for {}, which is not among the targets of this run",
            bench::full_name(*named.target));
      append(words[named.target], words_of(*named.target, flags));
    }
  }
  return words;
}

LaunchWords launch_words(const std::vector<std::string>& variables, const Environment& environment) {
  LaunchWords words;
  for (const std::string& word : variables) words.environment.push_back(variable_of(word, environment));
  for (const Flag& flag : flags_in(environment.get("TORCHRUN_ARGS").value_or("")))
    take_launcher_flag(flag, words);
  return words;
}

}  // namespace trireme::cli
