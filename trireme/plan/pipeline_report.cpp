#include "trireme/plan/pipeline_report.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/plan/idle_causes.h"

namespace trireme::plan {
namespace {

using Kind = ActionKind;
using Place = std::pair<int64_t, int64_t>;  // stage and micro-batch

double median(std::vector<double> values) {
  if (values.empty()) return 0.0;
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

/// When what passes make for others was there.
struct Ends {
  std::map<std::tuple<Message, int64_t, int64_t>, double> made;
  std::map<Place, double> forward;

  Ends(const Schedule& schedule, const StageEvents& events) {
    for (const auto& rank : events) {
      for (const StageEvent& event : rank) {
        if (!event.is_pass()) continue;
        for (const StageEdge& edge : made_by(schedule, event.pass()))
          made[{edge.message, edge.stage, event.micro_batch}] = event.end;
        if (event.kind == Kind::kForward) forward[{event.stage, event.micro_batch}] = event.end;
      }
    }
  }
  /// When the pass whose message a rank waits for has ended.
  double of(const StageEvent& wait) const { return made.at({wait.message, wait.stage, wait.micro_batch}); }
};

void check_events(const Schedule& schedule, const StageEvents& events) {
  TRIREME_CHECK(events.size() == schedule.ranks.size(),
                "[plan.report_step] there are events of {} ranks for a schedule of {}", events.size(),
                schedule.ranks.size());
  for (size_t rank = 0; rank < events.size(); ++rank) {
    size_t next = 0;
    const std::vector<StagePass>& passes = schedule.ranks[rank];
    for (const StageEvent& event : events[rank]) {
      if (!event.is_pass()) continue;
      const bool fits = next < passes.size() && passes[next].kind == event.kind &&
                        passes[next].stage == event.stage && passes[next].micro_batch == event.micro_batch;
      TRIREME_CHECK(
          fits,
          "[plan.report_step] pass {} of rank {} differs from the schedule {}: stage {}, micro-batch {}",
          next, rank, schedule.name, event.stage, event.micro_batch);
      ++next;
    }
    TRIREME_CHECK(next == passes.size(), "[plan.report_step] rank {} recorded {} of {} passes of {}", rank,
                  next, passes.size(), schedule.name);
  }
}

void begin_at_zero(StageEvents& events) {
  double first = std::numeric_limits<double>::infinity();
  for (const auto& rank : events) {
    for (const StageEvent& event : rank) first = std::min(first, event.begin);
  }
  for (auto& rank : events) {
    for (StageEvent& event : rank) {
      event.begin -= first;
      event.end -= first;
    }
  }
}

double end_of(const StageEvents& events, bool only_passes) {
  double end = 0.0;
  for (const auto& rank : events) {
    for (const StageEvent& event : rank) {
      if (event.is_pass() || !only_passes) end = std::max(end, event.end);
    }
  }
  return end;
}

/// Medians of what the stages' passes took. Where a stage runs whole backward passes only, they are counted
/// as passes for the input.
PassCosts measured_costs(const Schedule& schedule, const StageEvents& events) {
  const auto stages = static_cast<size_t>(schedule.all_stages());
  std::vector<std::map<Kind, std::vector<double>>> seconds(stages), bytes(stages);
  std::vector<double> transfers;
  const Ends ends(schedule, events);
  for (const auto& rank : events) {
    for (const StageEvent& event : rank) {
      if (event.is_pass()) {
        const auto stage = static_cast<size_t>(event.stage);
        seconds[stage][event.kind].push_back(event.end - event.begin);
        bytes[stage][event.kind].push_back(event.bytes);
      } else if (event.kind == Kind::kRecv) {
        const double made = ends.of(event);
        // A wait that began later does not show when its message arrived.
        if (event.begin <= made) transfers.push_back(std::max(0.0, event.end - made));
      }
    }
  }
  PassCosts costs;
  costs.forward.resize(stages);
  costs.backward_input.resize(stages);
  costs.backward_weight.resize(stages);
  costs.activation_bytes.resize(stages);
  costs.between_halves_bytes.resize(stages);
  for (size_t stage = 0; stage < stages; ++stage) {
    auto& of = seconds[stage];
    costs.forward[stage] = median(of[Kind::kForward]);
    const bool split = !of[Kind::kBackwardInput].empty();
    costs.backward_input[stage] = median(of[split ? Kind::kBackwardInput : Kind::kBackward]);
    costs.backward_weight[stage] = median(of[Kind::kBackwardWeight]);
    costs.activation_bytes[stage] = std::max(0.0, median(bytes[stage][Kind::kForward]));
    costs.between_halves_bytes[stage] = median(bytes[stage][Kind::kBackwardInput]);
  }
  costs.transfer = median(std::move(transfers));
  return costs;
}

/// All stages take what they take on average, and parts of the head what those do.
PassCosts balanced(const Schedule& schedule, PassCosts costs) {
  for (auto* values : {&costs.forward, &costs.backward_input, &costs.backward_weight}) {
    const auto parts = values->begin() + schedule.stages;
    for (const auto& [begin, end] : {std::pair(values->begin(), parts), {parts, values->end()}}) {
      if (begin == end) continue;
      std::fill(begin, end, std::accumulate(begin, end, 0.0) / static_cast<double>(end - begin));
    }
  }
  costs.transfer = 0.0;
  return costs;
}

/// The sends of a pass: its results travel, unless the rank that needs them is its own.
std::vector<StageEvent> sends_of(const Schedule& schedule, const TimedPass& timed,
                                 const std::map<std::pair<Message, int64_t>, double>& message_bytes) {
  const StagePass& pass = timed.pass;
  std::vector<StageEvent> sends;
  for (const StageEdge& made : made_by(schedule, pass)) {
    if (schedule.rank_of(made.from, pass.micro_batch) == schedule.rank_of(made.to, pass.micro_batch))
      continue;
    const auto bytes = message_bytes.find({made.message, made.stage});
    sends.push_back({.kind = Kind::kSend,
                     .stage = made.stage,
                     .micro_batch = pass.micro_batch,
                     .message = made.message,
                     .begin = timed.end,
                     .end = timed.end,
                     .bytes = bytes == message_bytes.end() ? 0.0 : bytes->second});
  }
  return sends;
}

StageEvents simulated_events(const Schedule& schedule, const PassCosts& costs, const StageEvents& measured) {
  std::map<std::pair<Message, int64_t>, std::vector<double>> sent;
  for (const auto& rank : measured) {
    for (const StageEvent& event : rank) {
      if (event.kind == Kind::kSend) sent[{event.message, event.stage}].push_back(event.bytes);
    }
  }
  std::map<std::pair<Message, int64_t>, double> message_bytes;
  for (const auto& [message, bytes] : sent) message_bytes[message] = median(bytes);
  StageEvents events;
  for (const RankTimeline& rank : simulate(schedule, costs).ranks) {
    std::vector<StageEvent>& into = events.emplace_back();
    for (const TimedPass& timed : rank.passes) {
      into.push_back({.kind = timed.pass.kind,
                      .stage = timed.pass.stage,
                      .micro_batch = timed.pass.micro_batch,
                      .begin = timed.begin,
                      .end = timed.end,
                      .bytes = timed.pass.kind == Kind::kBackwardInput
                                   ? costs.between_halves_bytes[static_cast<size_t>(timed.pass.stage)]
                                   : growth(timed.pass, costs)});
      for (const StageEvent& send : sends_of(schedule, timed, message_bytes)) into.push_back(send);
    }
  }
  return events;
}

/// The most bytes that micro-batches in flight hold on a rank: each what its forward pass took, until its
/// backward passes give it back.
double peak_bytes(const std::vector<StageEvent>& events) {
  std::map<Place, double> held;
  double sum = 0.0, peak = 0.0;
  for (const StageEvent& event : events) {
    if (!event.is_pass()) continue;
    double& mine = held[{event.stage, event.micro_batch}];
    sum -= mine;
    if (event.kind == Kind::kForward) mine = std::max(0.0, event.bytes);
    if (event.kind == Kind::kBackwardInput) mine = event.bytes;
    if (event.kind == Kind::kBackward || event.kind == Kind::kBackwardWeight) mine = 0.0;
    sum += mine;
    peak = std::max(peak, sum);
  }
  return peak;
}

/// Counts things from when they are made to when they are taken up; the most at once.
class Queue {
 public:
  void add(double made, double taken) {
    ++count_;
    if (taken <= made) return;
    changes_.emplace_back(made, 1);
    changes_.emplace_back(taken, -1);
  }
  int64_t deepest() {
    std::ranges::sort(changes_);  // at one time what is taken comes before what is made
    int64_t depth = 0, most = count_ > 0 ? 1 : 0;
    for (const auto& [time, change] : changes_) most = std::max(most, depth += change);
    return most;
  }

 private:
  std::vector<std::pair<double, int64_t>> changes_;
  int64_t count_ = 0;
};

std::vector<StageUse> stage_uses(const Schedule& schedule, const StageEvents& events) {
  const auto stages = static_cast<size_t>(schedule.all_stages());
  const Ends ends(schedule, events);
  const double copies = schedule.placement == Placement::kTwoWays ? 2.0 : 1.0;
  std::vector<StageUse> uses(stages);
  std::vector<Queue> forward(stages), backward(stages);
  for (const auto& rank : events) {
    for (const StageEvent& event : rank) {
      if (!event.is_pass()) continue;
      const auto stage = static_cast<size_t>(event.stage);
      uses[stage].busy += (event.end - event.begin) / copies;
      const auto needs = needed_by(schedule, event.pass());
      double made = 0.0;
      for (const StageEdge& need : needs)
        made = std::max(made, ends.made.at({need.message, need.stage, event.micro_batch}));
      if (event.kind == Kind::kForward && event.stage > 0) forward[stage].add(made, event.begin);
      if (event.kind == Kind::kBackward || event.kind == Kind::kBackwardInput) {
        const double forward_end = ends.forward.at({event.stage, event.micro_batch});
        backward[stage].add(needs.empty() ? forward_end : made, event.begin);
      }
    }
  }
  for (size_t stage = 0; stage < stages; ++stage) {
    uses[stage].forward_queue = forward[stage].deepest();
    uses[stage].backward_queue = backward[stage].deepest();
  }
  return uses;
}

StepUse use_of(const Schedule& schedule, const StageEvents& events) {
  StepUse use;
  use.seconds = end_of(events, /*only_passes=*/true);
  use.stages = stage_uses(schedule, events);
  for (const auto& rank : events) {
    RankUse& mine = use.ranks.emplace_back();
    for (const StageEvent& event : rank) {
      if (event.is_pass()) mine.busy += event.end - event.begin;
      if (event.kind == Kind::kSend) mine.sent_bytes += event.bytes;
    }
    mine.idle = use.seconds - mine.busy;
    mine.peak_bytes = peak_bytes(rank);
  }
  return use;
}

}  // namespace

std::string_view name(IdleCause cause) {
  constexpr std::array<std::string_view, kIdleCauses> kNames = {"schedule", "imbalance", "communication",
                                                                "host"};
  return kNames.at(static_cast<size_t>(cause));
}

double StepUse::idle_share() const {
  double idle = 0.0;
  for (const RankUse& rank : ranks) idle += rank.idle;
  return seconds > 0.0 ? idle / (seconds * static_cast<double>(ranks.size())) : 0.0;
}

PipelineReport report_step(const Schedule& schedule, StageEvents events) {
  return report_step(schedule, std::move(events), schedule);
}

PipelineReport report_step(const Schedule& schedule, StageEvents events, const Schedule& simulated) {
  check_events(schedule, events);
  begin_at_zero(events);
  PipelineReport report;
  report.schedule = schedule;
  report.simulated = simulated;
  report.measured = use_of(schedule, events);
  report.after_s = end_of(events, /*only_passes=*/false) - report.measured.seconds;
  report.costs = measured_costs(schedule, events);
  report.idle = idle_spans(schedule, events, report.measured.seconds,
                           simulate(schedule, balanced(schedule, report.costs)));
  for (size_t rank = 0; rank < events.size(); ++rank) {
    for (const IdleSpan& span : report.idle[rank])
      report.measured.ranks[rank].idle_causes[static_cast<size_t>(span.cause)] += span.end - span.begin;
  }
  report.ideal = simulated_events(simulated, report.costs, events);
  report.predicted = use_of(simulated, report.ideal);
  report.events = std::move(events);
  return report;
}

std::vector<ClockOffset> clock_offsets(const std::vector<std::vector<Meeting>>& seen) {
  std::vector<ClockOffset> offsets;
  for (const auto& mine : seen) {
    double least = -std::numeric_limits<double>::infinity(), most = -least;
    for (size_t i = 0; i < mine.size(); ++i) {
      // Neither left before the other had come.
      const Meeting& zero = seen.front()[i];
      least = std::max(least, zero.entered - mine[i].left);
      most = std::min(most, zero.left - mine[i].entered);
    }
    offsets.push_back({0.5 * (least + most), 0.5 * (most - least)});
  }
  if (!offsets.empty()) offsets.front() = {};
  return offsets;
}

}  // namespace trireme::plan
