#include "trireme/checkpoint/fit.h"

#include <algorithm>
#include <map>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/checkpoint/cast.h"
#include "trireme/checkpoint/safetensors_header.h"

namespace trireme::checkpoint {
namespace {

constexpr const char* kOptimizerPrefix = "optimizer.";
constexpr const char* kBelongTogether = "check that the checkpoint and the config belong together";

/// The tensor that a model has under a name.
struct Wanted {
  plan::Shape shape;
  bool counts = false;  ///< a whole number, which nothing converts to

  bool takes(const std::string& dtype) const { return counts ? dtype == "I64" : can_cast(dtype, "F32"); }
};

std::map<std::string, Wanted> wanted_by(const plan::ModelFacts& facts) {
  std::map<std::string, Wanted> wanted;
  for (const plan::UnitSpec& unit : facts.units) {
    for (const plan::ParamSpec& param : unit.params) wanted[param.name] = {param.shape};
  }
  for (const plan::BufferSpec& buffer : facts.buffers)
    wanted[buffer.name] = {buffer.shape, buffer.shape.empty()};
  return wanted;
}

/// Running statistics of batch norm, as torch calls them.
bool are_statistics(const std::vector<std::string>& names) {
  return !names.empty() && std::ranges::all_of(names, [](const std::string& name) {
    return name.ends_with(".running_mean") || name.ends_with(".running_var") ||
           name.ends_with(".num_batches_tracked");
  });
}

/// The parameters of batch norm and of group norm have the same names and shapes.
const char* advice(const std::vector<std::string>& missing, const std::vector<std::string>& extra) {
  if (are_statistics(missing) && extra.empty())
    return "these are running statistics of batch norm, so the weights are of a model with another norm: set "
           "model.norm=group, or take weights that were trained with batch norm";
  if (are_statistics(extra) && missing.empty())
    return "these are running statistics, so the weights are of a model with batch norm: set "
           "model.norm=batch "
           "or model.norm=sync_batch";
  return kBelongTogether;
}

}  // namespace

std::vector<std::string> parameter_names(const plan::ModelFacts& facts) {
  std::vector<std::string> names;
  for (const plan::UnitSpec& unit : facts.units) {
    for (const plan::ParamSpec& param : unit.params) names.push_back(param.name);
  }
  return names;
}

void check_fit(const Source& source, const plan::ModelFacts& facts, bool may_have_more) {
  const std::map<std::string, Wanted> wanted = wanted_by(facts);
  std::vector<std::string> missing, extra, wrong, other_dtypes;
  bool counts_differ = false;
  for (const auto& [name, want] : wanted) {
    const auto found = source.tensors().find(name);
    if (found == source.tensors().end()) {
      missing.push_back(name);
    } else if (found->second.shape != want.shape) {
      wrong.push_back(fmt::format("{} is {} [{}], but [{}] in the model", name, found->second.dtype,
                                  fmt::join(found->second.shape, ", "), fmt::join(want.shape, ", ")));
    } else if (!want.takes(found->second.dtype)) {
      other_dtypes.push_back(fmt::format("{} is {}", name, found->second.dtype));
      counts_differ |= want.counts;
    }
  }
  for (const auto& [name, tensor] : source.tensors()) {
    if (!wanted.contains(name) && !name.starts_with(kOptimizerPrefix)) extra.push_back(name);
  }
  if (may_have_more) extra.clear();
  std::vector<std::string> problems;
  if (!wrong.empty()) problems.push_back(some_of(wrong));
  if (!missing.empty()) problems.push_back(fmt::format("{} missing: {}", missing.size(), some_of(missing)));
  if (!extra.empty())
    problems.push_back(fmt::format("{} not in the model: {}", extra.size(), some_of(extra)));
  if (problems.empty() && !other_dtypes.empty()) {
    throw DataError(
        "[checkpoint.fit] {} has weights of dtypes that no model here reads: {}; save them as {} with the "
        "tool that wrote them",
        source.path(), some_of(other_dtypes), counts_differ ? "I64" : "F32, BF16 or F16");
  }
  if (!other_dtypes.empty()) problems.push_back(some_of(other_dtypes));
  if (problems.empty()) return;
  throw DataError("[checkpoint.fit] {} does not have the weights of this model: {}; {}", source.path(),
                  join(problems, "; "), wrong.empty() ? advice(missing, extra) : kBelongTogether);
}

}  // namespace trireme::checkpoint
