#include "trireme/bench/target.h"

#include <algorithm>
#include <charconv>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/bench/targets/families.h"

namespace trireme::bench {
namespace {

/// Names of published programs that are measured by a command of their own.
constexpr std::pair<std::string_view, std::string_view> kElsewhere[] = {
    {"collective_ops", "trireme bench comm"},
    {"bandwidth_test", "trireme bench comm"},
    {"point_to_point", "trireme bench comm"},
    {"ddp_resnet_cifar10", "labs/cifar10/benchmark_runner.py"},
    {"fsdp_resnet_cifar10", "labs/cifar10/benchmark_runner.py"}};

std::vector<Target> made_targets() {
  std::vector<Target> all;
  for (auto family : {replicated_targets, sharded_targets, pipeline_targets, mesh_targets, scaling_targets,
                      accumulation_targets, checkpoint_targets}) {
    for (Target& target : family()) all.push_back(std::move(target));
  }
  return all;
}

bool is_in(const Target& target, const std::string& chapter) {
  return std::ranges::find(target.chapters, chapter) != target.chapters.end();
}

bool is_chapter(const std::string& word) {
  const std::vector<std::string> chapters = all_chapters();
  return std::ranges::find(chapters, word) != chapters.end();
}

/// "1f1b_2stages" becomes "1f1b", and its number is returned.
std::optional<int64_t> take_stages(std::string& name) {
  constexpr std::string_view kStages = "stages";
  const size_t line = name.rfind('_');
  if (line == std::string::npos || !name.ends_with(kStages)) return std::nullopt;
  int64_t count = 0;
  const char* const end = name.data() + name.size() - kStages.size();
  const auto [stop, error] = std::from_chars(name.data() + line + 1, end, count);
  if (error != std::errc() || stop != end) return std::nullopt;
  name.resize(line);
  return count;
}

/// The name without what scripts have around it: "baseline_zero1.py" is "zero1".
std::string bare(std::string name) {
  if (name.ends_with(".py")) name.resize(name.size() - 3);
  for (const std::string_view prefix : {"baseline_", "optimized_"}) {
    if (name.starts_with(prefix)) name.erase(0, prefix.size());
  }
  return name;
}

const Target* target_called(const std::string& name) {
  for (const Target& target : all_targets()) {
    if (target.name == name || std::ranges::find(target.aliases, name) != target.aliases.end())
      return &target;
  }
  return nullptr;
}

std::vector<std::string> all_names() {
  std::vector<std::string> names = all_chapters();
  for (const Target& target : all_targets()) {
    names.push_back(target.name);
    names.insert(names.end(), target.aliases.begin(), target.aliases.end());
  }
  return names;
}

[[noreturn]] void refuse(const std::string& word, const std::string& name) {
  for (const auto& [other, command] : kElsewhere) {
    if (name == other)
      throw ConfigError("[bench.targets] '{}' is no target here; '{}' measures it", word, command);
  }
  std::string near = nearest_name(name, all_names());
  if (near.empty()) near = nearest_name(word, all_names());
  throw ConfigError("[bench.targets] there is no target '{}'; {}'trireme bench list-targets' lists them",
                    word, near.empty() ? "" : fmt::format("did you mean '{}'? ", near));
}

/// The folder or chapter before a name, without the mark between them; empty where there is none.
std::string place_of(const std::string& word) {
  const size_t mark = word.find_last_of(":/");
  return mark == std::string::npos ? "" : word.substr(0, mark);
}

std::string without_last_slash(std::string word) {
  while (word.ends_with('/')) word.pop_back();
  return word;
}

}  // namespace

const std::vector<Target>& all_targets() {
  static const std::vector<Target> all = made_targets();
  return all;
}

std::vector<std::string> all_chapters() {
  std::vector<std::string> chapters;
  for (const Target& target : all_targets()) {
    for (const std::string& one : target.chapters) {
      if (std::ranges::find(chapters, one) == chapters.end()) chapters.push_back(one);
    }
  }
  return chapters;
}

std::vector<Choice> targets_of_chapter(const std::string& given) {
  const std::string chapter = without_last_slash(given);
  std::vector<Choice> chosen;
  for (const Target& target : all_targets()) {
    if (is_in(target, chapter)) chosen.push_back({.target = &target});
  }
  if (!chosen.empty()) return chosen;
  const std::string near = nearest_name(chapter, all_chapters());
  throw ConfigError("[bench.targets] there is no chapter '{}'; {}chapters are {}", given,
                    near.empty() ? "" : fmt::format("did you mean '{}'? ", near), join(all_chapters(), ", "));
}

std::vector<Choice> find_targets(const std::string& given) {
  const std::string word = without_last_slash(given);
  if (is_chapter(word)) return targets_of_chapter(word);
  const std::string place = place_of(word);
  std::string name = bare(word.substr(place.empty() ? 0 : place.size() + 1));
  Choice choice{.target = target_called(name)};
  if (choice.target == nullptr) {
    choice.ranks = take_stages(name);
    choice.target = target_called(name);
  }
  if (choice.target == nullptr) refuse(given, name);
  if (is_chapter(place) && !is_in(*choice.target, place)) {
    throw ConfigError("[bench.targets] '{}' is no target of {}; its chapters are {}", name, place,
                      join(choice.target->chapters, ", "));
  }
  return {choice};
}

std::string full_name(const Target& target) {
  return "train:" + target.name;
}

std::string owed_text(const Arm& arm) {
  switch (arm.owed) {
    case Owed::kSameWeights:
      return "the same weights, bit for bit";
    case Owed::kSameLosses:
      return "the same losses but for rounding";
    case Owed::kNearLosses:
      return fmt::format("losses within {:g}%", 100.0 * arm.bound);
    case Owed::kFiniteLosses:
      return "finite losses of a batch of its own";
  }
  return "";
}

double loss_bound(const std::string& compute) {
  return compute == "fp32" ? 1e-5 : 5e-3;
}

std::vector<Arm> arms_on(const Comparison& comparison, const std::string& device, int64_t ranks) {
  std::vector<Arm> arms = comparison.arms;
  std::erase_if(arms,
                [&](const Arm& arm) { return arm.ranks > ranks || (arm.needs_gpu && device == "cpu"); });
  return arms;
}

std::string obstacle(const Target& target, const std::string& device, std::optional<int64_t> ranks,
                     const std::vector<std::string>& keys) {
  const bool emulated =
      !target.on_cpu_with.empty() && std::ranges::find(keys, target.on_cpu_with) != keys.end();
  if (target.needs_gpu && device == "cpu" && !emulated) {
    return target.on_cpu_with.empty() ? "it needs a GPU"
                                      : fmt::format("it needs a GPU, or --{}", target.on_cpu_with);
  }
  if (!ranks || std::ranges::find(target.ranks, *ranks) != target.ranks.end()) return "";
  std::vector<std::string> counts;
  for (const int64_t count : target.ranks) counts.push_back(std::to_string(count));
  return fmt::format("it takes {} ranks, not {}", join(counts, " or "), *ranks);
}

std::vector<std::string> keys_of(const Target& target, const Arm& arm, const std::string& device,
                                 int64_t ranks) {
  std::vector<std::string> keys = target.workload;
  const std::vector<std::string>& of_device = device == "cpu" ? target.on_cpu : target.on_gpu;
  keys.insert(keys.end(), of_device.begin(), of_device.end());
  if (target.pipelined) keys.push_back(fmt::format("parallel.pp={}", ranks));
  keys.insert(keys.end(), arm.keys.begin(), arm.keys.end());
  return keys;
}

}  // namespace trireme::bench
