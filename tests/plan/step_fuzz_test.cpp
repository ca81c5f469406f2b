// verify() as a law: of thousands of edits of step programs, none that trains wrongly is accepted. What
// trains wrongly is judged by following gradients through the step with symbols, by code that shares nothing
// with verify().
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "tests/support/planned_step.h"
#include "trireme/base/env.h"
#include "trireme/base/error.h"
#include "trireme/plan/memory.h"
#include "trireme/plan/pipeline.h"
#include "trireme/plan/step_program.h"

namespace trireme::plan {
namespace {

/// Gradients as sums of symbols: how often each micro-batch is in them.
using Sum = std::map<int64_t, int64_t>;

void add(Sum& sum, const Sum& other) {
  for (const auto& [micro_batch, times] : other) sum[micro_batch] += times;
}

/// Follows a step in its order and says whether it does what `original` does: each unit is whole and new when
/// it computes, activations go from each forward pass into one backward pass, and the update of each unit
/// takes every micro-batch once, of all ranks.
class Judge {
 public:
  explicit Judge(const StepProgram& original) : original_(original) {
    for (const Action& action : original.actions) {
      if (action.kind == ActionKind::kForward) forwards_.insert({action.unit, action.micro_batch});
      if (action.kind == ActionKind::kReduce) sends_[action.unit] = action.wire_bytes();
      if (action.kind == ActionKind::kUnshard) gathers_[action.unit] = action.wire_bytes();
      if (action.kind == ActionKind::kGatherSum) sums_[action.unit] = action.wire_bytes();
      lanes_[action.kind] = action.lane;
    }
  }

  /// Empty: it trains as the original does.
  std::string fault(const StepProgram& program) const {
    std::map<int64_t, Sum> there, summed;
    std::map<std::pair<int64_t, int64_t>, int> kept, half;
    std::map<int64_t, int> updates;
    std::set<int64_t> whole, gathered_sum;
    std::set<std::pair<int64_t, int64_t>> ran;
    std::vector<std::pair<int64_t, int64_t>> path;
    const auto comes_and_goes = [&](int64_t unit) {
      return std::ranges::none_of(original_.buffers, [&](const Buffer& buffer) {
        return buffer.role == Role::kParameters && buffer.unit == unit && buffer.is_kept();
      });
    };
    if (memory_of(program) != memory_of(original_)) return "other memory";
    if (messages_of(program) != messages_of(original_)) return "other messages";
    for (const Action& action : program.actions) {
      const int64_t unit = action.unit;
      const std::pair place{unit, action.micro_batch};
      if (action.lane != lanes_.at(action.kind)) return "another lane";
      if (action.computes() && unit >= 0 && comes_and_goes(unit) && !whole.contains(unit) &&
          action.kind != ActionKind::kBackwardWeight)
        return "a unit computes that is not whole";
      switch (action.kind) {
        case ActionKind::kUnshard:
          if (action.wire_bytes() != gathers_.at(unit)) return "another gather";
          whole.insert(unit);
          break;
        case ActionKind::kReshard:
          whole.erase(unit);
          break;
        case ActionKind::kForward:
          if (!forwards_.contains(place) || !ran.insert(place).second) return "another forward pass";
          ++kept[place];
          path.push_back(place);
          break;
        case ActionKind::kBackward:
        case ActionKind::kBackwardInput:
          if (kept[place]-- != 1) return "a backward pass without activations";
          if (action.kind == ActionKind::kBackwardInput) {
            ++half[place];
          } else {
            take(there, program, place);
          }
          break;
        case ActionKind::kBackwardWeight:
          if (half[place]-- != 1) return "a weight pass without its first half";
          take(there, program, place);
          break;
        case ActionKind::kReduce:
          if (action.wire_bytes() != sends_.at(unit)) return "another reduction";
          add(summed[unit], there[unit]);
          there[unit].clear();
          gathered_sum.erase(unit);
          break;
        case ActionKind::kGatherSum:
          if (action.wire_bytes() != sums_.at(unit)) return "another gather of sums";
          gathered_sum.insert(unit);
          break;
        case ActionKind::kUpdate: {
          if (++updates[unit] > 1) return "a second update";
          if (!trainable(unit)) break;
          Sum wanted;
          for (const auto& [of, micro_batch] : forwards_) {
            if (of == unit || of == Action::kWholeModel) ++wanted[micro_batch];
          }
          if (summed[unit] != wanted) return "an update with other gradients";
          if (sums_.contains(unit) && !gathered_sum.contains(unit)) return "an update with a part of a sum";
          whole.erase(unit);
          break;
        }
        default:
          break;
      }
    }
    if (ran != forwards_) return "a forward pass is missing";
    for (int64_t unit = 0; unit < std::ssize(program.units); ++unit) {
      if (updates[unit] != 1) return "an update is missing";
    }
    for (const auto& [unit, bytes] : gathers_) {
      if (!comes_and_goes(unit) && !whole.contains(unit)) return "parameters are left as they were";
    }
    return "";
  }

 private:
  bool trainable(int64_t unit) const { return original_.units[static_cast<size_t>(unit)].trainable; }

  /// What has memory, but for when.
  static std::multiset<std::tuple<Role, int64_t, int64_t, int64_t>> memory_of(const StepProgram& program) {
    std::multiset<std::tuple<Role, int64_t, int64_t, int64_t>> memory;
    for (const Buffer& buffer : program.buffers)
      memory.emplace(buffer.role, buffer.unit, buffer.micro_batch, buffer.bytes);
    return memory;
  }

  /// Messages, each with the number of passes of its unit and micro-batch that come before it.
  static std::multiset<std::tuple<ActionKind, int64_t, int64_t, int64_t, int64_t, int64_t>> messages_of(
      const StepProgram& program) {
    std::multiset<std::tuple<ActionKind, int64_t, int64_t, int64_t, int64_t, int64_t>> messages;
    std::map<std::pair<int64_t, int64_t>, int64_t> passes;
    for (const Action& action : program.actions) {
      const std::pair place{action.unit, action.micro_batch};
      if (action.computes() && action.kind != ActionKind::kBackwardWeight) ++passes[place];
      if (action.kind != ActionKind::kSend && action.kind != ActionKind::kRecv) continue;
      messages.emplace(action.kind, action.unit, action.micro_batch, action.peer, action.wire_bytes(),
                       passes[place]);
    }
    return messages;
  }

  /// The whole model's gradients are those of all its units.
  static void take(std::map<int64_t, Sum>& there, const StepProgram& program,
                   const std::pair<int64_t, int64_t>& place) {
    for (int64_t unit = 0; unit < std::ssize(program.units); ++unit) {
      if (place.first == unit || place.first == Action::kWholeModel) ++there[unit][place.second];
    }
  }

  const StepProgram& original_;
  std::set<std::pair<int64_t, int64_t>> forwards_;
  std::map<int64_t, int64_t> sends_, gathers_, sums_;  ///< bytes by unit
  std::map<ActionKind, Lane> lanes_;
};

/// Places in a program whose action at `place` was removed (-1) or has one more before it (1).
void shift(StepProgram& program, int64_t place, int64_t by) {
  const auto moved = [&](int64_t at) { return at > place || (by > 0 && at == place) ? at + by : at; };
  for (Pass& pass : program.passes) {
    pass.begin = pass.begin > place ? pass.begin + by : pass.begin;
    pass.end = pass.end > place ? pass.end + by : pass.end;
  }
  for (Buffer& buffer : program.buffers) {
    if (buffer.is_kept()) continue;
    buffer.from = moved(buffer.from);
    buffer.to = by < 0 && buffer.to == place ? std::max<int64_t>(0, place - 1) : moved(buffer.to);
  }
  for (Action& action : program.actions) action.awaits = action.awaits < 0 ? -1 : moved(action.awaits);
}

void remove(StepProgram& program, int64_t place) {
  program.actions.erase(program.actions.begin() + place);
  shift(program, place, -1);
}

/// An edit as somebody makes who changes, moves, removes or repeats a line of a program's text.
class Editor {
 public:
  explicit Editor(uint64_t seed) : random_(seed) {}

  StepProgram edited(StepProgram program) {
    const int64_t place = below(std::ssize(program.actions));
    Action& action = program.actions[static_cast<size_t>(place)];
    switch (below(12)) {
      case 0:
      case 1:
        remove(program, place);
        break;
      case 2: {
        const Action again = action;
        shift(program, place, 1);
        program.actions.insert(program.actions.begin() + place, again);
        break;
      }
      case 3: {
        const int64_t other = below(std::ssize(program.actions));
        std::swap(program.actions[static_cast<size_t>(place)], program.actions[static_cast<size_t>(other)]);
        break;
      }
      case 4:
        if (place + 1 < std::ssize(program.actions)) std::swap(action, (&action)[1]);
        break;
      case 5:
        action.transfers.clear();
        break;
      case 6:
        for (Transfer& transfer : action.transfers) transfer.bytes /= 2;
        break;
      case 7:
        action.lane = static_cast<Lane>(below(static_cast<int64_t>(kNames<Lane>.size())));
        break;
      case 8:
        action.micro_batch = below(3);
        break;
      case 9:
        action.unit = below(std::ssize(program.units));
        break;
      case 10: {
        Buffer& buffer = program.buffers[static_cast<size_t>(below(std::ssize(program.buffers)))];
        if (buffer.role != Role::kBoundary) buffer.bytes /= 2;
        break;
      }
      default: {
        Pass& pass = program.passes[static_cast<size_t>(below(std::ssize(program.passes)))];
        pass.kind = static_cast<Pass::Kind>(below(static_cast<int64_t>(kNames<Pass::Kind>.size())));
      }
    }
    return program;
  }

 private:
  int64_t below(int64_t bound) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(bound)); }
  std::mt19937_64 random_;
};

std::vector<StepProgram> data_parallel_programs() {
  const std::vector<UnitSpec> units = {{"root", {{"a", {1000, 8}}}},
                                       {"h.0", {{"b", {4000, 8}}, {"c", {1024}}}},
                                       {"h.1", {{"d", {4000, 8}}, {"e", {1024}}}},
                                       {"head", {{"f", {2000, 8}}}}};
  std::vector<StepProgram> programs;
  for (const char* policy : {"ddp", "zero1", "zero2", "fsdp", "fsdp:shard_grad_op"}) {
    for (const int64_t accumulation : {1, 3}) {
      for (const bool once : {true, false}) {
        for (const bool beside : {true, false}) {
          programs.push_back(test::planned_step(units,
                                                {.policy = find_policy(policy),
                                                 .mesh = MeshShape({1, 1, 4, 1, 1}),
                                                 .compute_bytes = 2,
                                                 .wire_bytes = 2,
                                                 .accumulation = accumulation,
                                                 .reduces_once = once,
                                                 .beside = beside},
                                                {0, 700, 700, 0}));
        }
      }
    }
  }
  return programs;
}

std::vector<StepProgram> pipeline_programs() {
  std::vector<StepProgram> programs;
  for (const ScheduleName schedule : all_values<ScheduleName>()) {
    const Config config = load({.overrides = {"parallel.pp=2", "pipeline.micro_batches=4", "model.n_layers=6",
                                              fmt::format("pipeline.schedule={}", schedule)}},
                               Environment())
                              .config;
    const MeshShape mesh = MeshShape::fit(config.parallel, 4);
    const BatchPlan batch = plan_batch(config, mesh);
    const ModelFacts facts = describe(config.model, config.data.seq_len, config.precision, config.memory);
    for (const int64_t rank : {0, 1}) {
      programs.push_back(
          config_program(config, facts, batch, engine_setting(config, mesh, batch.accumulation), rank));
    }
  }
  return programs;
}

bool is_accepted(const StepProgram& program) {
  try {
    verify(program);
    return true;
  } catch (const Error&) {
    return false;
  }
}

void fuzz(const std::vector<StepProgram>& programs, int64_t edits, uint64_t seed) {
  Editor editor(seed);
  int64_t wrong = 0;
  for (int64_t edit = 0; edit < edits; ++edit) {
    const StepProgram& original = programs[static_cast<size_t>(edit) % programs.size()];
    const StepProgram edited = editor.edited(original);
    const std::string fault = Judge(original).fault(edited);
    if (fault.empty()) continue;
    ++wrong;
    ASSERT_FALSE(is_accepted(edited)) << "edit " << edit << ": " << fault << "\n" << to_text(edited);
  }
  EXPECT_GT(wrong, edits / 3) << "the judge finds fault with what the editor does";
}

TEST(StepFuzz, ProgramsAreRightToBeginWith) {
  for (const auto& programs : {data_parallel_programs(), pipeline_programs()}) {
    for (const StepProgram& program : programs) {
      ASSERT_EQ(Judge(program).fault(program), "");
      ASSERT_NO_THROW(verify(program));
    }
  }
}

TEST(StepFuzz, NoEditThatTrainsWronglyIsAccepted) {
  fuzz(data_parallel_programs(), 6000, 7);
}

TEST(StepFuzz, NoEditOfAPipelineThatTrainsWronglyIsAccepted) {
  fuzz(pipeline_programs(), 3000, 8);
}

/// A step without the actions that `drop` names, as a text is cut by hand.
StepProgram without(StepProgram program, const std::function<bool(const Action&)>& drop) {
  for (int64_t place = std::ssize(program.actions); place-- > 0;) {
    if (drop(program.actions[static_cast<size_t>(place)])) remove(program, place);
  }
  return program;
}

TEST(StepFuzz, PartsOfAStepThatAreLeftOutAreMissed) {
  for (const auto& programs : {data_parallel_programs(), pipeline_programs()}) {
    for (const StepProgram& program : programs) {
      for (const ActionKind kind :
           {ActionKind::kAccumulate, ActionKind::kReduce, ActionKind::kGatherSum, ActionKind::kUpdate,
            ActionKind::kBackward, ActionKind::kBackwardInput, ActionKind::kBackwardWeight,
            ActionKind::kForward, ActionKind::kRecv, ActionKind::kWait}) {
        if (std::ranges::find(program.actions, kind, &Action::kind) == program.actions.end()) continue;
        EXPECT_FALSE(is_accepted(without(program, [&](const Action& action) { return action.kind == kind; })))
            << name(kind) << "\n"
            << to_text(program);
      }
    }
  }
}

/// Gathers may come earlier, as long as their memory does, and reductions later.
TEST(StepFuzz, LegalEditsStayAccepted) {
  int64_t edits = 0;
  for (const StepProgram& original : data_parallel_programs()) {
    for (int64_t place = 1; place < std::ssize(original.actions); ++place) {
      StepProgram program = original;
      Action &before = program.actions[static_cast<size_t>(place) - 1], &gather = (&before)[1];
      const bool same_pass = std::ranges::find(program.passes, place, &Pass::begin) == program.passes.end();
      if (!same_pass || gather.kind != ActionKind::kUnshard || before.kind != ActionKind::kForward) continue;
      for (Buffer& buffer : program.buffers) {
        if (buffer.role == Role::kParameters && buffer.unit == gather.unit && buffer.from == place)
          --buffer.from;
      }
      std::swap(before, gather);
      EXPECT_EQ(Judge(original).fault(program), "");
      EXPECT_NO_THROW(verify(program)) << to_text(program);
      ++edits;
    }
  }
  EXPECT_GT(edits, 10);
}

}  // namespace
}  // namespace trireme::plan
