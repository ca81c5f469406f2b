#include "trireme/train/same_config.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/hash.h"
#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/plan/config_files.h"
#include "trireme/plan/pipeline.h"

namespace trireme::train {
namespace {

using Values = nlohmann::ordered_json;

/// Keys of which each rank may have its own value: they say where something is, what it runs on, and what
/// rank 0 tells. The data itself is compared (prepare.h). A key that is not here is compared.
bool may_differ(const std::string& key) {
  static const std::set<std::string> keys = {"name",         "device",          "data.path",
                                             "data.mixture", "data.tokenizer",  "data.chat_template",
                                             "data.threads", "train.log_every", "comm.timeout_s"};
  return keys.contains(key);
}

/// Empty where this rank cannot read it: then its path tells the difference.
std::string text_of(const plan::ConfigFile& file, const plan::Config& config) {
  try {
    return file.text(config);
  } catch (const ConfigError&) {
    return {};
  }
}

/// What ranks must have alike: of files not where they are.
Values compared(plan::Config config) {
  for (const plan::ConfigFile& file : plan::config_files()) {
    if (const std::string text = text_of(file, config); !text.empty())
      file.path(config) = fmt::format("a {} with digest {}", file.kept_as, hex64(xxh3(text)));
  }
  if (!config.model.weights.empty()) config.model.weights = "a file or folder";
  if (!config.model.adapter.weights.empty()) config.model.adapter.weights = "a folder";
  Values values = Values::object();
  for (const plan::Field& field : plan::fields(config)) {
    if (may_differ(field.key)) continue;
    values[field.key] = std::visit([](const auto& value) { return Values(value); }, plan::value_of(field));
  }
  return values;
}

/// A prompt may hold bytes that are no UTF-8.
std::string text_of(const Values& values) {
  return values.dump(-1, ' ', false, Values::error_handler_t::replace);
}

/// "optim.lr=0.1 instead of 0.0003".
std::vector<std::string> differences(const Values& mine, const Values& first) {
  std::vector<std::string> found;
  for (const auto& [key, value] : mine.items()) {
    const auto other = first.find(key);
    if (other != first.end() && *other != value)
      found.push_back(fmt::format("{}={} instead of {}", key, text_of(value), text_of(*other)));
  }
  return found;
}

/// Waits until every rank has read the last text: the store ends with the process of rank 0.
void leave_together(comm::World& world) {
  try {
    world.gather_texts("farewell", "");
  } catch (const CommError& error) {
    log_debug("{}", error.what());  // the failure is what counts
  }
}

}  // namespace

void check_same_config(const plan::Config& config, comm::World& world) {
  if (world.size() == 1) return;
  const std::string mine = text_of(compared(config));
  const std::vector<std::string> digests = world.gather_texts("digest of the config", hex64(xxh3(mine)));
  const auto other = std::ranges::find_if(digests, [&](const std::string& one) { return one != digests[0]; });
  if (other == digests.end()) return;
  const auto rank = other - digests.begin();
  const bool tells = world.rank() == 0 || world.rank() == rank;
  const std::vector<std::string> told = world.gather_texts("config", tells ? mine : std::string());
  leave_together(world);
  const auto alike = std::ranges::count(digests, digests[0]);
  throw ConfigError(
      "[train.config] rank {} was given another config than rank 0: {} ({} of {} ranks have that of rank 0); "
      "start all hosts with the same config file, TRIREME__ variables and arguments",
      rank, join(differences(Values::parse(told[static_cast<size_t>(rank)]), Values::parse(told[0])), ", "),
      alike, digests.size());
}

}  // namespace trireme::train
