#include "trireme/plan/given_program.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/plan/lowering.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/text_file.h"

namespace trireme::plan {
namespace {

constexpr size_t kMostProgramBytes = size_t{64} << 20;

/// Whether a step must do it, whatever the order. When parameters are whole, and what waits, is left to the
/// program.
bool is_work(const Action& action) {
  return action.kind != ActionKind::kUnshard && action.kind != ActionKind::kReshard &&
         action.kind != ActionKind::kWait && action.kind != ActionKind::kPost;
}

std::string in_words(const StepProgram& program, const Action& action) {
  std::string text = std::string(name(action.kind));
  if (action.unit != Action::kWholeModel)
    text += fmt::format(" of {}", program.units[static_cast<size_t>(action.unit)].name);
  if (action.micro_batch != Action::kOnceAStep) text += fmt::format(" in micro-batch {}", action.micro_batch);
  if (action.is_message()) text += fmt::format(" for stage {} with rank {}", action.stage, action.peer);
  for (const Transfer& transfer : action.transfers)
    text +=
        fmt::format(", {} of {} bytes among {} ranks", transfer.collective, transfer.bytes, transfer.ranks);
  return text;
}

std::multiset<std::string> work_of(const StepProgram& program) {
  std::multiset<std::string> work;
  for (const Action& action : program.actions)
    if (is_work(action)) work.insert(in_words(program, action));
  return work;
}

void check_units(const StepProgram& given, const StepProgram& planned) {
  if (given.units.size() != planned.units.size())
    throw ConfigError("it has {} units, and this run {}", given.units.size(), planned.units.size());
  for (size_t i = 0; i < planned.units.size(); ++i) {
    const ProgramUnit &here = given.units[i], &there = planned.units[i];
    if (here.name == there.name && here.numel == there.numel && here.trainable == there.trainable &&
        here.fp8 == there.fp8 && here.frozen == there.frozen && here.nf4 == there.nf4 &&
        here.tied == there.tied)
      continue;
    const auto described = [](const ProgramUnit& unit) {
      return fmt::format("{} of {} elements and {} frozen ones{}{}{}{}", unit.name, unit.numel, unit.frozen,
                         unit.fp8 ? ", in FP8" : "", unit.nf4 ? ", in NF4" : "",
                         unit.trainable ? "" : ", not trained", unit.tied ? ", tied" : "");
    };
    throw ConfigError("unit {} is {}, but in this run {}", i, described(here), described(there));
  }
}

void check_work(const StepProgram& given, const StepProgram& planned) {
  const std::multiset<std::string> here = work_of(given), there = work_of(planned);
  std::vector<std::string> missing, foreign;
  std::ranges::set_difference(there, here, std::back_inserter(missing));
  std::ranges::set_difference(here, there, std::back_inserter(foreign));
  if (!foreign.empty()) {
    throw ConfigError("'{}' is no part of this run's step{}", foreign.front(),
                      missing.empty() ? "" : fmt::format(", and '{}' of it is missing", missing.front()));
  }
  if (!missing.empty()) throw ConfigError("'{}' is missing", missing.front());
}

/// Passes and messages of stages in the order in which the program has them.
StageActions stage_actions(const StepProgram& program) {
  StageActions actions;
  for (const Pass& pass : program.passes) {
    bool computed = false;
    for (auto place = static_cast<size_t>(pass.begin); place < static_cast<size_t>(pass.end); ++place) {
      const Action& action = program.actions[place];
      if (action.is_message()) {
        actions.push_back(action);
      } else if (const auto kind = computing(pass.kind); kind && !computed) {
        actions.push_back({.kind = *kind, .micro_batch = pass.micro_batch, .stage = pass.stage});
        computed = true;
      }
    }
  }
  return actions;
}

std::vector<StepProgram> read_programs(const Config& config, size_t ranks) {
  std::vector<StepProgram> programs = step_programs_from_text(given_text(config));
  if (programs.size() == ranks) return programs;
  throw ConfigError(
      "[plan.step_program] train.step_program '{}' has programs for {} ranks of a pipeline, but "
      "parallel.pp is {}; print them with trireme plan step --text --all-ranks for this config",
      config.train.step_program, programs.size(), ranks);
}

void check_rank(const StepProgram& given, const StepProgram& planned) {
  check_units(given, planned);
  verify(given);
  check_work(given, planned);
}

/// The identity of an action or a buffer, apart from sizes and place.
using Which = std::tuple<int, int64_t, int64_t, int64_t, int64_t, int>;
Which which(const Action& action) {
  return {static_cast<int>(action.kind),   action.unit, action.micro_batch, action.stage, action.peer,
          static_cast<int>(action.message)};
}
Which which(const Buffer& buffer) {
  return {static_cast<int>(buffer.role), buffer.unit, buffer.micro_batch, 0, 0, 0};
}

/// `given`, in the sizes of another rank along tp, whose planned step is `own` where that of the first is
/// `first`: parts of a vocabulary may differ by a word.
void take_sizes(StepProgram& given, const StepProgram& first, const StepProgram& own) {
  std::map<Which, std::vector<Transfer>> transfers;
  for (const Action& action : own.actions) transfers.emplace(which(action), action.transfers);
  std::map<std::pair<Which, int64_t>, int64_t> bytes;
  for (size_t i = 0; i < own.buffers.size(); ++i)
    bytes.emplace(std::pair(which(first.buffers[i]), first.buffers[i].bytes), own.buffers[i].bytes);
  given.units = own.units;
  for (Action& action : given.actions) {
    if (const auto found = transfers.find(which(action)); found != transfers.end())
      action.transfers = found->second;
  }
  for (Buffer& buffer : given.buffers) {
    if (const auto found = bytes.find({which(buffer), buffer.bytes}); found != bytes.end())
      buffer.bytes = found->second;
  }
}

}  // namespace

std::string programs_to_text(const std::vector<StepProgram>& programs) {
  if (programs.size() == 1) return to_text(programs.front());
  std::string text;
  for (size_t rank = 0; rank < programs.size(); ++rank)
    text += fmt::format("rank {}\n{}", rank, to_text(programs[rank]));
  return text;
}

std::vector<StepProgram> step_programs_from_text(std::string_view text) {
  std::vector<std::string> parts;
  for (const std::string& line : split(std::string(text), '\n')) {
    if (line.starts_with("rank ")) {
      if (line != fmt::format("rank {}", parts.size()))
        throw ConfigError("[plan.step_program] '{}' stands where rank {} is expected", line, parts.size());
      parts.emplace_back();
      continue;
    }
    if (parts.empty()) parts.emplace_back();
    parts.back() += line + '\n';
  }
  std::vector<StepProgram> programs;
  for (const std::string& part : parts) programs.push_back(step_program_from_text(part));
  return programs;
}

std::string given_text(const Config& config) {
  const std::string& file = config.train.step_program;
  if (file.empty()) return {};
  try {
    return read_text_file(file, kMostProgramBytes);
  } catch (const EnvironmentError& error) {
    throw ConfigError(
        "[plan.step_program] train.step_program '{}' cannot be read: {}; give a file that trireme plan step "
        "--text --all-ranks wrote",
        file, error.what());
  }
}

void order_as_given(Schedule& schedule, const Config& config) {
  if (config.train.step_program.empty()) return;
  const std::vector<StepProgram> programs = read_programs(config, schedule.ranks.size());
  for (size_t rank = 0; rank < programs.size(); ++rank) {
    std::vector<StagePass>& passes = schedule.ranks[rank];
    passes.clear();
    for (const Pass& pass : programs[rank].passes) {
      if (const auto kind = computing(pass.kind)) passes.push_back({*kind, pass.stage, pass.micro_batch});
    }
  }
}

std::vector<StepProgram> given_programs(const Config& config, const BatchPlan& batch,
                                        const std::vector<StepProgram>& planned,
                                        const std::vector<StepProgram>& own) {
  std::vector<StepProgram> given = read_programs(config, planned.size());
  const std::string& file = config.train.step_program;
  size_t rank = 0;
  try {
    for (; rank < planned.size(); ++rank) check_rank(given[rank], planned[rank]);
  } catch (const Error& error) {
    throw ConfigError("[plan.step_program] train.step_program '{}', rank {}: {}", file, rank, error.what());
  }
  std::vector<StageActions> actions;
  for (const StepProgram& program : given) actions.push_back(stage_actions(program));
  for (size_t i = 0; i < own.size(); ++i) take_sizes(given[i], planned[i], own[i]);
  if (config.parallel.pp == 1) return given;
  try {
    check_programs(plan_pipeline(config, batch).schedule, actions);
  } catch (const Error& error) {
    throw ConfigError("[plan.step_program] train.step_program '{}': {}", file, error.what());
  }
  return given;
}

}  // namespace trireme::plan
