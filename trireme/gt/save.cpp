#include "trireme/gt/save.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/hash.h"
#include "trireme/checkpoint/unfinished.h"
#include "trireme/gt/program.h"
#include "trireme/gt/saved_file.h"

namespace gt {

using trireme::ConfigError;
using trireme::checkpoint::SafetensorsHeader;
using trireme::plan::TensorType;

namespace {

constexpr int64_t kAnySeed = std::numeric_limits<int64_t>::min();
const TensorType kStepType{.shape = {}, .dtype = Dtype::kInt64};

/// The name of what an optimizer keeps of a parameter.
std::string state_name(const std::string& kind, const std::string& parameter) {
  return fmt::format("{}{}.{}", SavedFile::kOptimizerPrefix, kind, parameter);
}

/// The program, outside of its schedules and captures: values of what is kept would be waited for forever.
std::shared_ptr<Program> program_for(const char* call, const source_location& where) {
  std::shared_ptr<Program> program = Program::current();
  if (program->kept_for() != 0)
    throw ConfigError(
        "[gt.{}] {}: workers do not have yet what a gt::schedule() or gt::Capture has made; "
        "call it before or after that",
        call, place_of(where));
  return program;
}

void check_name(const std::string& name, const Tensor& tensor, const Entries& before) {
  const auto fail = [&](const char* why) {
    throw ConfigError("[gt] the name '{}' {}; give each tensor one of its own", name, why);
  };
  if (name.empty() || name == "__metadata__") fail("is none for a tensor");
  if (name.starts_with(SavedFile::kOptimizerPrefix)) fail("begins as those of optimizers do");
  if (before.contains(name)) fail("comes twice");
  if (!tensor.defined()) fail("is of an empty tensor");
  for (const auto& [other, entry] : before) {
    if (entry.node == tensor.node())
      fail(fmt::format("is of a tensor that has the name '{}'", other).c_str());
  }
}

Entries entries_of(const Program& program, const nn::NamedTensors& named) {
  Entries entries;
  for (const auto& [name, tensor] : named) {
    check_name(name, tensor, entries);
    program.check_own(tensor.node());
    entries[name] = {.type = tensor.node()->type, .node = tensor.node()};
  }
  return entries;
}

/// The names of the optimizer's parameters, in its order.
std::vector<std::string> names_of(const Optimizer& optimizer, const Entries& entries) {
  std::vector<std::string> names;
  for (const Optimizer::State& state : optimizer.states()) {
    const auto found = std::ranges::find_if(
        entries, [&](const auto& one) { return one.second.node == state.parameter.node(); });
    if (found == entries.end())
      throw ConfigError("[gt] a parameter {} of the optimizer has no name among {} tensors; give all",
                        to_text(state.parameter.node()->type), entries.size());
    names.push_back(found->first);
  }
  return names;
}

std::string bytes_of_number(int64_t number) {
  return {reinterpret_cast<const char*>(&number), sizeof number};
}

void add_state(Entries& entries, const Optimizer& optimizer) {
  const std::vector<std::string> names = names_of(optimizer, entries);
  for (size_t i = 0; i < names.size(); ++i) {
    const Optimizer::State& state = optimizer.states()[i];
    entries[state_name("step", names[i])] = {.type = kStepType, .bytes = bytes_of_number(state.steps)};
    for (size_t kind = 0; kind < state.moments.size(); ++kind) {
      const NodePtr& moment = state.moments[kind].node();
      entries[state_name(optimizer.kinds()[kind], names[i])] = {.type = moment->type, .node = moment};
    }
  }
}

/// Wide elements come first, so that each tensor begins at a multiple of its element's size.
std::vector<std::string> order_of(const Entries& entries) {
  std::vector<std::string> order;
  for (const auto& [name, entry] : entries) order.push_back(name);
  std::ranges::stable_sort(order, {},
                           [&](const std::string& name) { return -bytes_of(entries.at(name).type.dtype); });
  return order;
}

SafetensorsHeader header_of(const Entries& entries, std::map<std::string, std::string> metadata) {
  metadata["format"] = "pt";
  metadata[SavedFile::kDigest] = SavedFile::kNoDigest;
  SafetensorsHeader header{.tensors = {}, .metadata = std::move(metadata)};
  int64_t end = 0;
  for (const std::string& name : order_of(entries)) {
    const TensorType& type = entries.at(name).type;
    const int64_t begin = std::exchange(end, end + type.bytes());
    header.tensors[name] = {
        .dtype = stored_name(type.dtype), .shape = type.shape, .begin = begin, .end = end};
  }
  return header;
}

/// A file's folder, which is made, and its name with links followed.
std::string target_of(const std::string& path) {
  if (path.empty() || trireme::is_special_file(path))
    throw ConfigError("[gt.save] '{}' is not a regular file; give a path for one", path);
  std::string target = trireme::follow_links(path);
  const auto folder = std::filesystem::path(target).parent_path();
  if (!folder.empty()) trireme::make_directories(folder);
  return target;
}

/// The header has the digest of all that is behind it, and so comes last.
void write(const std::string& path, Program& program, const Entries& entries,
           std::map<std::string, std::string> metadata, const source_location& where) {
  const Program::Aside without_grad(program, false);
  SafetensorsHeader header = header_of(entries, std::move(metadata));
  std::string preamble = safetensors_preamble(header);
  trireme::checkpoint::UnfinishedFile file(target_of(path));
  trireme::StreamingHash hash;
  hash.update(preamble.data(), preamble.size());
  auto at = static_cast<int64_t>(preamble.size());
  for (const std::string& name : order_of(entries)) {
    const Entry& entry = entries.at(name);
    const std::string bytes = entry.node ? program.peek(entry.node, where).get() : entry.bytes;
    TRIREME_CHECK(std::ssize(bytes) == entry.type.bytes(), "[gt.save] {} bytes came for '{}' {}",
                  bytes.size(), name, to_text(entry.type));
    hash.update(bytes.data(), bytes.size());
    file.write(std::exchange(at, at + std::ssize(bytes)), bytes.data(), std::ssize(bytes));
  }
  header.metadata[SavedFile::kDigest] = trireme::hex64(hash.digest());
  preamble = safetensors_preamble(header);
  file.write(0, preamble.data(), std::ssize(preamble));
  file.finish();
}

void check_assignable(Program& program, const Entries& entries, const source_location& where) {
  for (const auto& [name, entry] : entries) program.check_assignable(entry.node, where);
}

void assign(Program& program, const Entries& entries, SavedFile& file, const source_location& where) {
  for (const auto& [name, entry] : entries) program.assign(entry.node, file.take(name), where);
}

/// What a file may have of an optimizer: moments of a parameter that was never updated are not there.
void add_wanted_state(Entries& entries, const Optimizer& optimizer, const std::vector<std::string>& names) {
  for (size_t i = 0; i < names.size(); ++i) {
    const TensorType& type = optimizer.states()[i].parameter.node()->type;
    entries[state_name("step", names[i])] = {.type = kStepType};
    for (const std::string& kind : optimizer.kinds())
      entries[state_name(kind, names[i])] = {.type = type, .is_optional = true};
  }
}

/// A parameter's state of the file, on no workers yet: where its moments lie follows from the parameter.
Optimizer::State state_of(Program& program, const Tensor& parameter, const std::string& name,
                          const std::vector<std::string>& kinds, SavedFile& file,
                          const source_location& where) {
  Optimizer::State state{.parameter = parameter, .steps = file.count(state_name("step", name))};
  for (const std::string& kind : kinds) {
    const std::string moment = state_name(kind, name);
    if (file.has(moment) != (state.steps > 0))
      file.fail(
          fmt::format("'{}' is {}there after {} updates", moment, state.steps > 0 ? "not " : "", state.steps),
          SavedFile::kSameModel);
    if (state.steps > 0)
      state.moments.emplace_back(program.input(parameter.node()->type, file.take(moment), where));
  }
  return state;
}

}  // namespace

void save(const std::string& path, const nn::NamedTensors& named, source_location where) {
  const std::shared_ptr<Program> program = program_for("save", where);
  write(path, *program, entries_of(*program, named), {}, where);
}

void load(const std::string& path, const nn::NamedTensors& named, source_location where) {
  const std::shared_ptr<Program> program = program_for("load", where);
  const Entries entries = entries_of(*program, named);
  check_assignable(*program, entries, where);
  SavedFile file(path, entries, false);
  assign(*program, entries, file, where);
}

void save_training(const std::string& path, const nn::NamedTensors& named, const Optimizer& optimizer,
                   int64_t step, source_location where) {
  const std::shared_ptr<Program> program = program_for("save", where);
  if (step < 0) throw ConfigError("[gt.save] {} steps are done; count them from 0", step);
  Entries entries = entries_of(*program, named);
  add_state(entries, optimizer);
  const std::map<std::string, std::string> notes = {{SavedFile::kState, "1"},
                                                    {SavedFile::kStep, std::to_string(step)},
                                                    {SavedFile::kSeed, std::to_string(program->next_seed)}};
  write(path, *program, entries, notes, where);
}

int64_t load_training(const std::string& path, const nn::NamedTensors& named, Optimizer& optimizer,
                      source_location where) {
  const std::shared_ptr<Program> program = program_for("load", where);
  const Entries parameters = entries_of(*program, named);
  const std::vector<std::string> names = names_of(optimizer, parameters);
  check_assignable(*program, parameters, where);
  Entries entries = parameters;
  add_wanted_state(entries, optimizer, names);
  SavedFile file(path, entries, true);
  const int64_t step = file.note(SavedFile::kStep, 0), seed = file.note(SavedFile::kSeed, kAnySeed);
  std::vector<Optimizer::State> states;
  for (size_t i = 0; i < names.size(); ++i)
    states.push_back(
        state_of(*program, optimizer.states_[i].parameter, names[i], optimizer.kinds(), file, where));
  assign(*program, parameters, file, where);
  optimizer.states_ = std::move(states);
  program->next_seed = seed;
  return step;
}

}  // namespace gt
