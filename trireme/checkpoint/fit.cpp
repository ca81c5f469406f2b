#include "trireme/checkpoint/fit.h"

#include <map>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/checkpoint/cast.h"
#include "trireme/checkpoint/safetensors_header.h"

namespace trireme::checkpoint {
namespace {

constexpr const char* kOptimizerPrefix = "optimizer.";
}  // namespace

std::vector<std::string> parameter_names(const plan::ModelFacts& facts) {
  std::vector<std::string> names;
  for (const plan::UnitSpec& unit : facts.units) {
    for (const plan::ParamSpec& param : unit.params) names.push_back(param.name);
  }
  return names;
}

void check_fit(const Source& source, const plan::ModelFacts& facts, bool may_have_more) {
  std::map<std::string, const plan::ParamSpec*> params;
  for (const plan::UnitSpec& unit : facts.units) {
    for (const plan::ParamSpec& param : unit.params) params.emplace(param.name, &param);
  }
  std::vector<std::string> missing, extra, wrong;
  for (const auto& [name, param] : params) {
    const auto found = source.tensors().find(name);
    if (found == source.tensors().end()) {
      missing.push_back(name);
    } else if (found->second.shape != param->shape || !can_cast(found->second.dtype, "F32")) {
      wrong.push_back(fmt::format("{} is {} [{}], but [{}] in the model", name, found->second.dtype,
                                  fmt::join(found->second.shape, ", "), fmt::join(param->shape, ", ")));
    }
  }
  for (const auto& [name, tensor] : source.tensors()) {
    if (!params.contains(name) && !name.starts_with(kOptimizerPrefix)) extra.push_back(name);
  }
  std::vector<std::string> problems;
  if (!wrong.empty()) problems.push_back(some_of(wrong));
  if (!missing.empty()) problems.push_back(fmt::format("{} missing: {}", missing.size(), some_of(missing)));
  if (!extra.empty() && !may_have_more)
    problems.push_back(fmt::format("{} not in the model: {}", extra.size(), some_of(extra)));
  if (problems.empty()) return;
  throw DataError(
      "[checkpoint.fit] {} does not have the weights of this model: {}; check that the checkpoint and the "
      "config belong together",
      source.path(), join(problems, "; "));
}

}  // namespace trireme::checkpoint
