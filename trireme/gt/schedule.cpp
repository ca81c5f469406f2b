#include "trireme/gt/schedule.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/gt/program.h"
#include "trireme/plan/simulate.h"

namespace gt {

using trireme::ConfigError;
using trireme::plan::ActionKind;
using trireme::plan::Instruction;
using trireme::plan::InstructionKind;
using trireme::plan::Schedule;
using trireme::plan::ScheduleName;
using trireme::plan::StagePass;

namespace {

/// A pass: whether forward, its stage, its micro-batch.
using PassKey = std::tuple<bool, int64_t, int64_t>;

/// The instructions of each pass.
class Passes {
 public:
  /// Sorts what was recorded for a micro-batch by stage. What belongs to none goes with the last one before
  /// it.
  void deal(bool forward, int64_t micro_batch, const std::vector<Program::Recorded>& recorded) {
    int64_t stage = 0;
    all_.insert(all_.end(), recorded.begin(), recorded.end());
    for (const Program::Recorded& one : recorded) {
      if (one.stage >= 0) stage = one.stage;
      const bool frees = one.instruction.kind == InstructionKind::kFree;
      (frees ? frees_ : passes_[{forward, stage, micro_batch}]).push_back(one);
    }
  }

  /// In the order in which they were recorded.
  const std::vector<Program::Recorded>& all() const { return all_; }

  /// In the order of these passes, each tensor freed behind its last use. Throws ConfigError for a tensor
  /// that would be used before it is made.
  std::vector<Program::Recorded> in_order(const std::vector<StagePass>& order, int64_t stages) const {
    std::vector<Program::Recorded> ordered;
    for (const StagePass& pass : order) {
      for (const Program::Recorded& one : of(pass, stages)) ordered.push_back(one);
    }
    check(ordered);
    return with_frees(ordered);
  }

 private:
  /// A backward pass for the input leaves gradients of weights to that for the weights, under a number of its
  /// own.
  std::vector<Program::Recorded> of(const StagePass& pass, int64_t stages) const {
    const auto found = passes_.find({pass.kind == ActionKind::kForward, pass.stage, pass.micro_batch});
    if (found == passes_.end()) return {};
    std::vector<Program::Recorded> recorded = found->second;
    if (pass.kind == ActionKind::kForward || pass.kind == ActionKind::kBackward) return recorded;
    std::vector<Program::Recorded> weights;
    for (Program::Recorded& one : recorded) {
      if (one.instruction.kind != InstructionKind::kBackward) continue;
      one.instruction.attributes.whole[0] = 1 + pass.micro_batch * stages + pass.stage;
      Instruction later{.kind = InstructionKind::kWeights, .signal = one.instruction.signal};
      later.attributes.whole[0] = one.instruction.attributes.whole[0];
      weights = {{later, one.placed, pass.stage}};
    }
    return pass.kind == ActionKind::kBackwardWeight ? weights : recorded;
  }

  void check(const std::vector<Program::Recorded>& ordered) const {
    std::set<uint32_t> open;  // made in the schedule, and not yet
    for (const Program::Recorded& one : all_) {
      for (size_t i = 0; i < one.instruction.outputs; ++i) open.insert(one.instruction.output[i]);
    }
    for (const Program::Recorded& one : ordered) {
      for (size_t i = 0; i < one.instruction.inputs; ++i) {
        if (open.contains(one.instruction.input[i]))
          throw ConfigError(
              "[gt.schedule] line {}: what a stage does for a micro-batch is one pass, and this needs a "
              "tensor that "
              "comes later, from a stage behind; give it a stage of its own in the file of signals",
              one.instruction.line);
      }
      for (size_t i = 0; i < one.instruction.outputs; ++i) open.erase(one.instruction.output[i]);
    }
  }

  std::vector<Program::Recorded> with_frees(const std::vector<Program::Recorded>& ordered) const {
    std::map<uint32_t, size_t> last_uses;
    for (size_t at = 0; at < ordered.size(); ++at) {
      const Instruction& one = ordered[at].instruction;
      for (size_t i = 0; i < one.inputs; ++i) last_uses[one.input[i]] = at;
      for (size_t i = 0; i < one.outputs; ++i) last_uses[one.output[i]] = at;
    }
    std::multimap<size_t, Program::Recorded> behind;
    std::vector<Program::Recorded> all;
    for (const Program::Recorded& one : frees_) {
      const auto used = last_uses.find(one.instruction.input[0]);
      if (used == last_uses.end()) {
        all.push_back(one);  // of a tensor from before
      } else {
        behind.emplace(used->second, one);
      }
    }
    for (size_t at = 0; at < ordered.size(); ++at) {
      all.push_back(ordered[at]);
      for (auto [next, end] = behind.equal_range(at); next != end; ++next) all.push_back(next->second);
    }
    return all;
  }

  std::map<PassKey, std::vector<Program::Recorded>> passes_;
  std::vector<Program::Recorded> all_, frees_;
};

ScheduleName schedule_named(const std::string& name) {
  const auto found = trireme::plan::parse<ScheduleName>(name);
  if (found) return *found;
  const std::vector<std::string> names(trireme::plan::kNames<ScheduleName>.begin(),
                                       trireme::plan::kNames<ScheduleName>.end());
  throw ConfigError("[gt.schedule] there is no schedule '{}'; use one of {}", name,
                    trireme::join(names, ", "));
}

/// The schedule for the stages of the file of signals, which lie as it has them.
Schedule schedule_for(const Program& program, const std::string& name, int64_t micro_batches) {
  if (program.stages() == 0)
    throw ConfigError(
        "[gt.schedule] the program has no stages; name a file of signals with entries like pp_stage0");
  const auto& signals = *program.signals_file();
  const Schedule made = make_schedule(
      schedule_named(name),
      {.ranks = std::ssize(signals.groups), .micro_batches = micro_batches, .chunks = signals.chunks()});
  const bool one_chunk = signals.chunks() == 1;
  if (made.stages != program.stages() || (!one_chunk && made.placement != signals.placement))
    throw ConfigError(
        "[gt.schedule] {} has {} stages on {} lists of workers, placed {}; the file has {}, placed {}", name,
        made.stages, signals.groups.size(), made.placement, program.stages(), signals.placement);
  return made;
}

/// Passes of all ranks in one order, in which each comes behind those that it needs.
std::vector<StagePass> in_one_order(const Schedule& schedule) {
  std::vector<std::tuple<double, size_t, size_t, StagePass>> timed;
  const auto simulation = simulate(schedule);
  for (size_t rank = 0; rank < simulation.ranks.size(); ++rank) {
    const auto& passes = simulation.ranks[rank].passes;
    for (size_t i = 0; i < passes.size(); ++i) timed.emplace_back(passes[i].begin, rank, i, passes[i].pass);
  }
  std::ranges::sort(timed, {}, [](const auto& one) {
    return std::tuple(std::get<0>(one), std::get<1>(one), std::get<2>(one));
  });
  std::vector<StagePass> order;
  for (const auto& one : timed) order.push_back(std::get<3>(one));
  return order;
}

/// Records while it lives.
class Recording {
 public:
  Recording(Program& program, Passes& passes) : program_(program), passes_(passes) {
    if (program_.is_recording())
      throw ConfigError("[gt.schedule] a schedule is under way; its micro-batches have none of their own");
    program_.record(&recorded_);
  }
  ~Recording() {
    program_.record(nullptr);
    passes_.deal(false, 0, recorded_);  // of a pass that was not ended
  }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  void end_pass(bool forward, int64_t micro_batch) {
    program_.record(&recorded_);  // frees that are open belong to what was recorded
    passes_.deal(forward, micro_batch, std::exchange(recorded_, {}));
  }

 private:
  Program& program_;
  Passes& passes_;
  std::vector<Program::Recorded> recorded_;
};

}  // namespace

std::vector<Tensor> schedule(const std::string& name, int64_t micro_batches,
                             const std::function<Tensor(int64_t micro_batch)>& loss_of,
                             source_location where) {
  const std::shared_ptr<Program> program = Program::current();
  const Schedule made = schedule_for(*program, name, micro_batches);
  std::vector<Tensor> losses;
  std::vector<Program::Recorded> ordered;
  Passes passes;
  try {
    {
      Recording recording(*program, passes);
      for (int64_t micro_batch = 0; micro_batch < micro_batches; ++micro_batch) {
        losses.push_back(loss_of(micro_batch));
        {
          const Tensor share = Operand(losses.back(), where) * (1.0 / static_cast<double>(micro_batches));
          recording.end_pass(true, micro_batch);
          share.backward(where);
        }
        recording.end_pass(false, micro_batch);
      }
    }
    ordered = passes.in_order(in_one_order(made), made.stages);
  } catch (...) {
    // The program knows these tensors, and whatever comes next may use or free them.
    program->submit(passes.all());
    throw;
  }
  program->submit(ordered);
  program->flush();
  return losses;
}

}  // namespace gt
