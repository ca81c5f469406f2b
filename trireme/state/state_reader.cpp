#include "trireme/state/state_reader.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/parallel/module_parameters.h"
#include "trireme/parallel/some_names.h"
#include "trireme/state/whole_state.h"

namespace trireme::state {
namespace {

std::string describe(at::ScalarType dtype, const std::vector<int64_t>& shape) {
  return fmt::format("{} [{}]", c10::toString(dtype), fmt::join(shape, ", "));
}

bool converts(at::ScalarType from, at::ScalarType to) {
  return from == to || (c10::isFloatingType(from) && c10::isFloatingType(to));
}

}  // namespace

bool StateReader::find(const std::string& wanted, const std::string& name) {
  const auto stored = file_.tensors().find(name);
  if (stored == file_.tensors().end()) return false;
  const Wanted& want = wanted_.at(wanted);
  used_.insert(name);
  if (!found_.emplace(wanted, name).second) return true;
  if (stored->second.shape != want.shape || !converts(stored->second.dtype, want.dtype)) {
    misfits_.push_back(fmt::format("{} is {} in the file but {} here", name,
                                   describe(stored->second.dtype, stored->second.shape),
                                   describe(want.dtype, want.shape)));
  }
  return true;
}

bool StateReader::allow(const std::string& name, const std::vector<int64_t>& shape, at::ScalarType dtype) {
  wanted_[name] = {shape, dtype};
  if (find(name, name)) return true;
  const auto alias = file_.metadata().find(name);
  return alias != file_.metadata().end() && find(name, alias->second);
}

void StateReader::want(const std::string& name, const std::vector<int64_t>& shape, at::ScalarType dtype) {
  if (!allow(name, shape, dtype)) missing_.push_back(name);
}

void StateReader::want_buffers(const torch::nn::Module& module) {
  const ModuleBuffers buffers = module_buffers(module);
  for (const auto& [name, buffer] : buffers.tensors) {
    want(name, buffer.sizes().vec(), buffer.scalar_type());
    if (has(name)) parallel::check_writable(name, buffer, "state.file");
  }
  for (const auto& [alias, name] : buffers.aliases) allow_alias(alias, name);
}

void StateReader::allow_alias(const std::string& alias, const std::string& name) {
  if (find(name, alias)) std::erase(missing_, name);
}

void StateReader::lacks(const std::vector<std::string>& names) {
  missing_.insert(missing_.end(), names.begin(), names.end());
}

void StateReader::check(const LoadOptions& options, bool ignores_optimizer) const {
  std::vector<std::string> problems, unexpected;
  for (const auto& [name, info] : file_.tensors()) {
    const bool ignored = ignores_optimizer && name.starts_with(kOptimizerPrefix);
    if (!used_.contains(name) && !ignored) unexpected.push_back(name);
  }
  if (!misfits_.empty()) problems.push_back(parallel::some_names(misfits_));
  if (!missing_.empty() && !options.missing)
    problems.push_back(fmt::format("{} missing: {}", missing_.size(), parallel::some_names(missing_)));
  if (!unexpected.empty() && !options.unexpected)
    problems.push_back(fmt::format("{} unexpected: {}", unexpected.size(), parallel::some_names(unexpected)));
  if (problems.empty()) return;
  throw DataError(
      "[state.file] {} does not match: {}; load the file of this module and optimizer, or allow "
      "missing or unexpected entries in LoadOptions",
      file_.path(), join(problems, "; "));
}

at::Tensor StateReader::read(const std::string& name, const plan::Region& region) const {
  return file_.read(found_.at(name), region);
}

void StateReader::read_buffers(torch::nn::Module& module) const {
  const at::NoGradGuard no_grad;
  for (auto& [name, buffer] : module_buffers(module).tensors) {
    if (has(name)) at::Tensor(buffer).copy_(read(name));
  }
}

}  // namespace trireme::state
