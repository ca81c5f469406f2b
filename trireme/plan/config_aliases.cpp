#include "trireme/plan/config_aliases.h"

#include <algorithm>
#include <cctype>
#include <map>

namespace trireme::plan {
namespace {

std::string in_lower_case(std::string word) {
  std::ranges::transform(word, word.begin(), [](unsigned char letter) { return std::tolower(letter); });
  return word;
}

/// As docs/images.md lists them.
const std::map<std::string, std::string>& alias_table() {
  static const std::map<std::string, std::string> aliases = {
      {"data.data_dir", "data.path"},
      {"data.dataset", "data.kind"},
      {"data.num_workers", "data.threads"},
      {"data.root", "data.path"},
      {"fsdp.mixed_precision", "precision.compute"},
      {"fsdp.sharding_strategy", "parallel.sharding"},
      {"model.name", "model.preset"},
      {"model.num_classes", "model.classes"},
      {"model.num_layers", "model.depth"},
      {"strategy", "parallel.policy"},
      {"training.batch_size", "train.rank_batch"},
      {"training.grad_clip", "train.grad_clip"},
      {"training.label_smoothing", "model.label_smoothing"},
      {"training.learning_rate", "optim.lr"},
      {"training.log_interval", "train.log_every"},
      {"training.momentum", "optim.momentum"},
      {"training.num_epochs", "train.epochs"},
      {"training.optimizer", "optim.name"},
      {"training.precision", "precision.compute"},
      {"training.seed", "seed"},
      {"training.warmup_steps", "optim.warmup_steps"},
      {"training.weight_decay", "optim.weight_decay"},
  };
  return aliases;
}

/// The assignment with another trainer's value in our words.
Assignment in_our_words(Assignment given) {
  const std::string word = in_lower_case(given.text);
  if (given.key == "data.kind" && (word == "cifar10" || word == "cifar100" || word == "mnist"))
    given.text = "images";
  if (given.key == "parallel.sharding" || given.key == "optim.name" || given.key == "precision.compute")
    given.text = word;
  // The network of the CIFAR-10 lab has no name of its own here: its depth and width are keys.
  if (given.key == "model.preset" && word == "small_resnet") {
    given.key = "model.family";
    given.text = "resnet";
  }
  return given;
}

}  // namespace

std::vector<std::string> alias_keys() {
  std::vector<std::string> keys;
  for (const auto& [key, ours] : alias_table()) keys.push_back(key);
  return keys;
}

std::vector<Assignment> in_our_keys(const Assignment& given) {
  const auto alias = alias_table().find(given.key);
  if (alias == alias_table().end()) return {given};
  std::vector<Assignment> ours = {
      in_our_words({.key = alias->second, .text = given.text, .origin = given.origin + " " + given.key})};
  if (alias->first == "fsdp.sharding_strategy")
    ours.push_back({.key = "parallel.policy", .text = "fsdp", .origin = ours.front().origin});
  return ours;
}

}  // namespace trireme::plan
