#include "trireme/plan/step_time.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "trireme/base/error.h"

namespace trireme::plan {
namespace {

/// When messages arrive: by sender, receiver, kind, stage and micro-batch.
using MessageKey = std::tuple<int64_t, int64_t, Message, int64_t, int64_t>;
using Mail = std::map<MessageKey, double>;

/// All that one rank has counted up to a moment.
struct RankTally {
  double clock = 0.0;
  RankSeconds seconds;
};

void add_scaled(RankSeconds& to, const RankSeconds& from, double factor) {
  for (size_t i = 0; i < kTimeCauses; ++i) to.causes[i] += factor * from.causes[i];
  to.communicating += factor * from.communicating;
  for (size_t i = 0; i < to.units.size(); ++i) {
    to.units[i].computing += factor * from.units[i].computing;
    to.units[i].gathering += factor * from.units[i].gathering;
    to.units[i].reducing += factor * from.units[i].reducing;
    to.units[i].waiting += factor * from.units[i].waiting;
  }
}

/// One rank on its way through a program. Lanes of transfers have clocks of their own where they run beside
/// computation.
class RankInTime {
 public:
  RankInTime(int64_t rank, const StepProgram& program, const ActionCosts& costs, const TimingSetting& setting)
      : rank_(rank),
        program_(program),
        costs_(costs),
        setting_(setting),
        gathered_(program.units.size(), 0.0),
        reduced_(program.units.size(), 0.0) {
    for (const ProgramUnit& unit : program.units) now_.seconds.units.push_back({.name = unit.name});
    if (program.passes.empty() || !repeats()) return;
    for (const Pass& pass : program.passes) {
      if (pass.kind == Pass::Kind::kBackward && pass.micro_batch < 2)
        repeated_[static_cast<size_t>(pass.micro_batch)].end = pass.end;
    }
  }

  double clock() const { return now_.clock; }
  bool is_done() const { return next_ == program_.actions.size(); }
  const Action& blocked_at() const { return program_.actions[next_]; }

  void begin_step(double clock) {
    next_ = 0;
    done_.assign(program_.actions.size(), 0.0);
    wait_until(clock, TimeCause::kStages, Action::kWholeModel);
    begin_ = now_;
    normed_ = false;
  }

  /// Runs actions until one waits for a message that has not been sent. Returns whether any ran.
  bool advance(Mail& mail) {
    const size_t before = next_;
    while (!is_done() && run(program_.actions[next_], mail)) {
      done_[next_] = action_end_;
      ++next_;
      for (Repeated& one : repeated_)
        if (static_cast<int64_t>(next_) == one.end) one.tally = now_;
    }
    return next_ > before;
  }

  /// The step from begin_step() on, with the micro-batches that the program does not show.
  RankTally step() const {
    RankTally tally{.clock = now_.clock - begin_.clock, .seconds = now_.seconds};
    add_scaled(tally.seconds, begin_.seconds, -1.0);
    if (!repeats()) return tally;
    const auto more = static_cast<double>(setting_.micro_batches - StepProgram::kMicroBatchesShown);
    tally.clock += more * (repeated_[1].tally.clock - repeated_[0].tally.clock);
    add_scaled(tally.seconds, repeated_[1].tally.seconds, more);
    add_scaled(tally.seconds, repeated_[0].tally.seconds, -more);
    return tally;
  }

 private:
  /// A pass at whose end the tally is kept, since the one in the middle stands for more.
  struct Repeated {
    int64_t end = -1;
    RankTally tally = {};
  };

  bool repeats() const {
    const bool staged = std::ranges::any_of(program_.actions, &Action::is_message);
    return !staged && setting_.micro_batches > StepProgram::kMicroBatchesShown;
  }
  double& cause(TimeCause cause) { return now_.seconds.causes[static_cast<size_t>(cause)]; }
  UnitSeconds* unit(int64_t index) {
    return index < 0 ? nullptr : &now_.seconds.units[static_cast<size_t>(index)];
  }

  void wait_until(double time, TimeCause why, int64_t for_unit) {
    if (time <= now_.clock) return;
    cause(why) += time - now_.clock;
    if (UnitSeconds* const seconds = unit(for_unit); seconds != nullptr && why != TimeCause::kHost)
      seconds->waiting += time - now_.clock;
    now_.clock = time;
  }
  void spend(double seconds, TimeCause why) {
    cause(why) += seconds;
    now_.clock += seconds;
  }

  bool run(const Action& action, Mail& mail) {
    action_end_ = now_.clock;
    switch (action.kind) {
      case ActionKind::kForward:
      case ActionKind::kBackward:
      case ActionKind::kBackwardInput:
      case ActionKind::kBackwardWeight:
        compute(action);
        break;
      case ActionKind::kUnshard:
        transfer(action, unshard_, 0.0, TimeCause::kGather);
        gathered_[static_cast<size_t>(action.unit)] = action_end_;
        break;
      case ActionKind::kReduce:
        transfer(action, reduce_, 0.0, TimeCause::kReduce);
        reduced_[static_cast<size_t>(action.unit)] = action_end_;
        break;
      case ActionKind::kGatherSum:
        transfer(action, unshard_, reduced_[static_cast<size_t>(action.unit)], TimeCause::kReduce);
        reduced_[static_cast<size_t>(action.unit)] = action_end_;
        break;
      case ActionKind::kSumTied:
        transfer(action, reduce_, 0.0, TimeCause::kReduce);
        wait_until(action_end_, TimeCause::kReduce, action.unit);
        break;
      case ActionKind::kAccumulate:
        if (!costs_.sum.empty()) work_on(action.unit, {{TimeCause::kSums, of(costs_.sum, action.unit)}});
        break;
      case ActionKind::kUpdate:
        update(action);
        break;
      case ActionKind::kSend:
        send(action, mail);
        break;
      case ActionKind::kRecv:
        return receive(action, mail);
      case ActionKind::kWait:
        wait_for(action);
        break;
      case ActionKind::kReshard:
      case ActionKind::kPost:
        break;
    }
    return true;
  }

  static double of(const std::vector<double>& seconds, int64_t unit) {
    return seconds[static_cast<size_t>(unit)];
  }

  void compute(const Action& action) {
    const bool whole = action.unit == Action::kWholeModel;
    const UnitWork& work = whole ? costs_.whole : costs_.work[static_cast<size_t>(action.unit)];
    if (whole) {
      for (const double gathered : gathered_) wait_until(gathered, TimeCause::kGather, action.unit);
    } else {
      wait_until(of(gathered_, action.unit), TimeCause::kGather, action.unit);
    }
    if (action.kind == ActionKind::kForward) work_on(action.unit, work.forward);
    const bool backward = action.kind == ActionKind::kBackward;
    if (backward || action.kind == ActionKind::kBackwardInput) work_on(action.unit, work.backward_input);
    if (backward || action.kind == ActionKind::kBackwardWeight) work_on(action.unit, work.backward_weight);
    for (const Transfer& one : action.transfers) {
      const double seconds = setting_.transfer_s(one);
      now_.seconds.communicating += seconds;
      spend(seconds, TimeCause::kParts);
    }
    action_end_ = now_.clock;
  }

  /// A device that its host runs ahead of waits only where the host has not launched all of this yet.
  void work_on(int64_t of_unit, const std::vector<Work>& work) {
    const double launches = setting_.launch_s * static_cast<double>(work.size()), before = now_.clock;
    for (const Work& one : work) spend(one.seconds, one.cause);
    host_ += launches;
    if (setting_.runs_ahead) {
      wait_until(host_, TimeCause::kHost, of_unit);
    } else {
      spend(launches, TimeCause::kHost);
    }
    if (UnitSeconds* const seconds = unit(of_unit)) seconds->computing += now_.clock - before;
    action_end_ = now_.clock;
  }

  void transfer(const Action& action, double& lane, double after, TimeCause why) {
    double seconds = 0.0;
    for (const Transfer& one : action.transfers) seconds += setting_.transfer_s(one);
    now_.seconds.communicating += seconds;
    if (UnitSeconds* const of_unit = unit(action.unit))
      (action.kind == ActionKind::kUnshard ? of_unit->gathering : of_unit->reducing) += seconds;
    action_end_ = std::max({lane, now_.clock, after}) + seconds;
    lane = action_end_;
    if (!setting_.beside) wait_until(action_end_, why, action.unit);
  }

  void update(const Action& action) {
    if (setting_.needs_norm && !normed_) {
      for (const double reduced : reduced_) wait_until(reduced, TimeCause::kReduce, action.unit);
      now_.seconds.communicating += setting_.norm_s;
      spend(setting_.norm_s, TimeCause::kReduce);
      normed_ = true;
    }
    wait_until(of(reduced_, action.unit), TimeCause::kReduce, action.unit);
    if (!costs_.update.empty()) work_on(action.unit, {{TimeCause::kUpdate, of(costs_.update, action.unit)}});
    action_end_ = now_.clock;
  }

  void send(const Action& action, Mail& mail) {
    double seconds = 0.0;
    for (const Transfer& one : action.transfers) seconds += setting_.transfer_s(one);
    send_ = std::max(send_, now_.clock) + seconds;
    action_end_ = send_;
    mail[{rank_, action.peer, action.message, action.stage, action.micro_batch}] = send_;
  }

  bool receive(const Action& action, Mail& mail) {
    const auto found = mail.find({action.peer, rank_, action.message, action.stage, action.micro_batch});
    if (found == mail.end()) return false;
    wait_until(found->second, TimeCause::kStages, Action::kWholeModel);
    mail.erase(found);
    action_end_ = now_.clock;
    return true;
  }

  void wait_for(const Action& action) {
    const auto at = static_cast<size_t>(action.awaits);
    const Action& awaited = program_.actions[at];
    wait_until(done_[at],
               awaited.kind == ActionKind::kUnshard ? TimeCause::kGather
               : awaited.is_message()               ? TimeCause::kStages
                                                    : TimeCause::kReduce,
               awaited.unit);
    action_end_ = now_.clock;
  }

  int64_t rank_;
  const StepProgram& program_;
  const ActionCosts& costs_;
  const TimingSetting& setting_;
  RankTally now_, begin_;
  Repeated repeated_[2];
  size_t next_ = 0;
  std::vector<double> done_;                ///< ends of actions
  std::vector<double> gathered_, reduced_;  ///< by unit: when its parameters, and its gradient, are there
  double unshard_ = 0.0, reduce_ = 0.0, send_ = 0.0, host_ = 0.0;  ///< until when lanes and host are busy
  double action_end_ = 0.0;
  bool normed_ = false;  ///< the norm of the step's gradient is there
};

double latest(const std::vector<RankInTime>& ranks) {
  double clock = 0.0;
  for (const RankInTime& rank : ranks) clock = std::max(clock, rank.clock());
  return clock;
}

void run_step(std::vector<RankInTime>& ranks) {
  Mail mail;
  const double begin = latest(ranks);
  for (RankInTime& rank : ranks) rank.begin_step(begin);
  for (bool moves = true; moves;) {
    moves = false;
    for (RankInTime& rank : ranks) moves = rank.advance(mail) || moves;
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].is_done()) continue;
    const Action& action = ranks[rank].blocked_at();
    throw ConfigError(
        "[plan.step_time] rank {} waits for the {} of micro-batch {} for stage {}, which rank {} never "
        "sends; check the programs of all ranks",
        rank, name(action.message), action.micro_batch, action.stage, action.peer);
  }
}

}  // namespace

double RankSeconds::exposed() const {
  return (*this)[TimeCause::kParts] + (*this)[TimeCause::kGather] + (*this)[TimeCause::kReduce];
}

const RankSeconds& StepTime::busiest() const {
  return *std::ranges::min_element(ranks, {},
                                   [](const RankSeconds& rank) { return rank[TimeCause::kStages]; });
}

double StepTime::idle() const {
  double waits = 0.0;
  for (const RankSeconds& rank : ranks) waits += rank[TimeCause::kStages];
  return waits / (seconds * static_cast<double>(ranks.size()));
}

StepTime time_of_programs(const std::vector<StepProgram>& programs, const std::vector<ActionCosts>& costs,
                          const TimingSetting& setting) {
  TRIREME_CHECK(!programs.empty() && programs.size() == costs.size(),
                "[plan.step_time] {} programs have the costs of {}", programs.size(), costs.size());
  std::vector<RankInTime> ranks;
  for (size_t rank = 0; rank < programs.size(); ++rank)
    ranks.emplace_back(static_cast<int64_t>(rank), programs[rank], costs[rank], setting);
  run_step(ranks);
  run_step(ranks);
  StepTime time;
  for (const RankInTime& rank : ranks) time.seconds = std::max(time.seconds, rank.step().clock);
  for (const RankInTime& rank : ranks) {
    const RankTally step = rank.step();
    RankSeconds& seconds = time.ranks.emplace_back(step.seconds);
    seconds.causes[static_cast<size_t>(TimeCause::kStages)] += time.seconds - step.clock;
  }
  return time;
}

}  // namespace trireme::plan
