#include "trireme/cli/step_view.h"
#include "trireme/cli/step_figures.h"

#include <algorithm>
#include <initializer_list>
#include <set>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/cli/words.h"
#include "trireme/plan/given_program.h"
#include "trireme/plan/unit_buffers.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using plan::Action;
using plan::ActionKind;
using plan::HeldBytes;
using plan::Pass;
using plan::Role;
using plan::StepProgram;
using report::Align;

constexpr std::string_view kPeakMark = "<- peak";

/// "-" for none, so that what is there stands out.
std::string some_bytes(int64_t bytes) {
  return bytes == 0 ? "-" : bytes_text(bytes);
}

const Action& action_at(const StepProgram& program, int64_t at) {
  return program.actions[static_cast<size_t>(at)];
}

/// Actions that repeat the first `period` of them, each time for units that are `step` further.
struct Run {
  int64_t begin = 0, period = 1, times = 1, step = 0;
  int64_t actions() const { return period * times; }
  int64_t end() const { return begin + actions(); }
};

/// `later` comes `actions` after `first` and does the same for the unit `shift` further.
bool repeats(const Action& first, const Action& later, int64_t actions, int64_t shift) {
  Action shifted = first;
  shifted.unit += shift;
  if (first.awaits >= 0) shifted.awaits += actions;
  return first.unit != Action::kWholeModel && shifted == later;
}

/// The run with as many repetitions as fit before `end`. The peak is never in a repetition.
Run extended(const StepProgram& program, Run run, int64_t end, int64_t peak) {
  for (; run.end() + run.period <= end; ++run.times) {
    if (run.end() <= peak && peak < run.end() + run.period) return run;
    for (int64_t at = 0; at < run.period; ++at) {
      const Action& first = action_at(program, run.begin + at);
      if (!repeats(first, action_at(program, run.end() + at), run.actions(), run.step * run.times))
        return run;
    }
  }
  return run;
}

/// The run of most actions that begins at `begin`; one that is not worth a line of its own is a single
/// action.
Run longest_run(const StepProgram& program, int64_t begin, int64_t end, int64_t peak) {
  constexpr int64_t kLongestPeriod = 12, kLeastTimes = 5;
  Run best{.begin = begin};
  for (int64_t period = 1; period <= kLongestPeriod; ++period) {
    for (const int64_t step : {1, -1}) {
      const Run run = extended(program, {begin, period, 1, step}, end, peak);
      if (run.times >= kLeastTimes && run.actions() > best.actions()) best = run;
    }
  }
  return best;
}

/// "transformer.h.1 to 11".
std::string unit_range(const std::string& first, const std::string& last) {
  const size_t dot = first.rfind('.');
  const bool alike = dot != std::string::npos && last.compare(0, dot + 1, first, 0, dot + 1) == 0;
  return fmt::format("{} to {}", first, alike ? last.substr(dot + 1) : last);
}

std::string micro_batch_text(int64_t micro_batch) {
  return micro_batch == Action::kOnceAStep ? "-" : std::to_string(micro_batch);
}

class StepText {
 public:
  StepText(const StepView& view, bool all, int64_t columns)
      : view_(view), program_(view.program), memory_(program_), all_(all), columns_(columns) {}
  std::string to_string();

 private:
  struct Row {
    std::string place, lane, action, unit, micro_batch;
    int64_t sent = 0;
    int64_t at = 0;  ///< action whose memory is shown
  };

  std::string heading() const;
  std::string passes();
  std::string pass(const Pass& pass) const;
  std::vector<Row> rows(const Pass& pass) const;
  Row row(int64_t at) const;
  Row folded(const Run& run) const;
  std::string table(const std::vector<Row>& rows) const;
  std::string wide_table(const std::vector<Row>& rows) const;
  std::string narrow_table(const std::vector<Row>& rows) const;
  const Pass* earlier_like(const Pass& pass) const;
  std::string hook_note() const;
  std::string totals() const;
  std::string peak() const;
  std::string ranges() const;
  std::string mark(int64_t at) const { return std::string(at == memory_.peak() ? kPeakMark : ""); }

  const StepView& view_;
  const StepProgram& program_;
  const StepMemory memory_;
  bool all_;
  int64_t columns_;
};

std::string StepText::heading() const {
  report::Table table({{"step program"}, {view_.name}});
  if (view_.planned) {
    const RunPlan& run = *view_.planned;
    const plan::Config& config = run.config;
    const auto setting = plan::engine_setting(config, run.mesh, run.batch.accumulation, run.device);
    table.add_row({"ranks", fmt::format("{} on {}, {}", run.ranks, run.device, run.mesh.to_string())});
    table.add_row({"policy", fmt::format("{}: {}", setting.policy.label(), setting.policy.summary)});
    table.add_row(
        {"lanes",
         setting.beside
             ? fmt::format("communication overlaps with computation; parallel.prefetch={}", setting.prefetch)
             : std::string("one action after the other: communication has no stream of its own")});
  }
  if (view_.planned && view_.planned->pipeline) {
    const plan::Schedule& schedule = view_.planned->pipeline->schedule;
    const int64_t rank = pp_rank_of(*view_.planned, view_.rank);
    table.add_row(
        {"pipeline",
         fmt::format("{}, rank {} of {} with {} {} of {}", schedule.name, rank, schedule.ranks.size(),
                     schedule.stages_of(rank).size() == 1 ? "stage" : "stages",
                     fmt::join(schedule.stages_of(rank), ", "), schedule.all_stages())});
  }
  const int64_t shown = StepProgram::kMicroBatchesShown;
  const bool some = !(view_.planned && view_.planned->pipeline) && view_.micro_batches > shown;
  const std::string more = some ? fmt::format(", of which 1 stands for 1 to {} and {} is the last",
                                              view_.micro_batches - shown + 1, shown - 1)
                                : "";
  table.add_row({"micro-batches", fmt::format("{} per step{}", view_.micro_batches, more)});
  table.add_row({"state", fmt::format("{} kept between steps", bytes_text(memory_.state()))});
  return table.to_string(columns_);
}

StepText::Row StepText::row(int64_t at) const {
  const Action& action = action_at(program_, at);
  return {.place = std::to_string(at),
          .lane = std::string(name(action.lane)),
          .action = action.awaits < 0 ? std::string(name(action.kind))
                                      : fmt::format("{} for {}", action.kind, action.awaits),
          .unit = unit_name(program_, action.unit),
          .micro_batch = micro_batch_text(action.micro_batch),
          .sent = action.wire_bytes(),
          .at = at};
}

/// All but the first time of a run, in a line.
StepText::Row StepText::folded(const Run& run) const {
  const int64_t begin = run.begin + run.period, end = run.end();
  int64_t unit = action_at(program_, run.begin).unit, sent = 0;
  for (int64_t at = begin; at < end; ++at) sent += action_at(program_, at).wire_bytes();
  for (int64_t at = run.begin + run.period; at-- > run.begin;) {
    if (action_at(program_, at).computes()) unit = action_at(program_, at).unit;
  }
  const std::string as =
      run.period == 1 ? fmt::format("as {}", run.begin) : fmt::format("as {} to {}", run.begin, begin - 1);
  return {.place = fmt::format("{} to {}", begin, end - 1),
          .lane = "",
          .action = as,
          .unit = unit_range(unit_name(program_, unit + run.step),
                             unit_name(program_, unit + run.step * (run.times - 1))),
          .micro_batch = micro_batch_text(action_at(program_, begin).micro_batch),
          .sent = sent,
          .at = end - 1};
}

std::vector<StepText::Row> StepText::rows(const Pass& pass) const {
  std::vector<Row> rows;
  for (int64_t at = pass.begin; at < pass.end;) {
    const Run run = all_ ? Run{.begin = at} : longest_run(program_, at, pass.end, memory_.peak());
    for (int64_t shown = at; shown < at + run.period; ++shown) rows.push_back(row(shown));
    if (run.times > 1) rows.push_back(folded(run));
    at = run.end();
  }
  return rows;
}

std::string StepText::wide_table(const std::vector<Row>& rows) const {
  report::Table table({{"#", Align::kRight},
                       {"lane"},
                       {"action"},
                       {"unit"},
                       {"m", Align::kRight},
                       {"sent", Align::kRight},
                       {"state", Align::kRight},
                       {"parameters", Align::kRight},
                       {"gradients", Align::kRight},
                       {"activations", Align::kRight},
                       {"total", Align::kRight},
                       {"after", Align::kRight},
                       {""}});
  for (const Row& row : rows) {
    const int64_t at = row.at;
    table.add_row({row.place, row.lane, row.action, row.unit, row.micro_batch, some_bytes(row.sent),
                   bytes_text(memory_.state()),
                   some_bytes(memory_.extra(
                       at, {Role::kParameters, Role::kShard, Role::kSlice, Role::kMaster, Role::kMoments})),
                   some_bytes(memory_.extra(at, {Role::kGradients, Role::kSum, Role::kReduced})),
                   some_bytes(memory_.extra(at, {Role::kActivations, Role::kBoundary})),
                   bytes_text(memory_.total(at)), bytes_text(memory_.total_after(at)), mark(at)});
  }
  return table.to_string();
}

std::string StepText::narrow_table(const std::vector<Row>& rows) const {
  report::Table table(
      {{"#", Align::kRight}, {"action"}, {"unit"}, {"sent", Align::kRight}, {"total", Align::kRight}, {""}});
  for (const Row& row : rows) {
    table.add_row({row.place, row.action, row.unit, some_bytes(row.sent), bytes_text(memory_.total(row.at)),
                   mark(row.at)});
  }
  return table.to_string(columns_);
}

std::string StepText::table(const std::vector<Row>& rows) const {
  const std::string wide = wide_table(rows);
  const std::vector<std::string> lines = split(wide, '\n');
  const auto columns = static_cast<int64_t>(std::ranges::max(lines, {}, &std::string::size).size());
  return columns_ == 0 || columns <= columns_ ? wide : narrow_table(rows);
}

/// A pass of another micro-batch with the same actions. One that holds the peak is like no other.
const Pass* StepText::earlier_like(const Pass& pass) const {
  if (pass.begin <= memory_.peak() && memory_.peak() < pass.end) return nullptr;
  for (const Pass& earlier : program_.passes) {
    if (&earlier == &pass) break;
    const int64_t apart = pass.begin - earlier.begin;
    bool same = earlier.kind == pass.kind && earlier.end - earlier.begin == pass.end - pass.begin;
    for (int64_t at = pass.begin; same && at < pass.end; ++at) {
      Action action = action_at(program_, at - apart);
      if (action.micro_batch != Action::kOnceAStep) action.micro_batch = pass.micro_batch;
      if (action.awaits >= 0) action.awaits += apart;
      same = action == action_at(program_, at);
    }
    if (same) return &earlier;
  }
  return nullptr;
}

std::string StepText::pass(const Pass& pass) const {
  const std::string of =
      pass.micro_batch == Action::kOnceAStep ? "" : fmt::format(", micro-batch {}", pass.micro_batch);
  const std::string title = fmt::format("\n{}{}", pass.kind, of);
  if (pass.begin == pass.end) return title + ": nothing\n";
  if (const Pass* const earlier = all_ ? nullptr : earlier_like(pass)) {
    int64_t most = 0;
    for (int64_t at = pass.begin; at < pass.end; ++at) most = std::max(most, memory_.total(at));
    return fmt::format("{}: {} to {} as {} to {}, at most {}\n", title, pass.begin, pass.end - 1,
                       earlier->begin, earlier->end - 1, bytes_text(most));
  }
  return title + "\n" + table(rows(pass));
}

std::string StepText::passes() {
  std::string text;
  for (const Pass& each : program_.passes) text += pass(each);
  return text;
}

/// Which of the steps is meant where a communication hook makes them differ.
std::string StepText::hook_note() const {
  if (!view_.planned || view_.planned->mesh.dp_size() == 1) return "";
  const plan::ParallelConfig& parallel = view_.planned->config.parallel;
  if (parallel.comm_hook == plan::CommHook::kLocalSgd)
    return fmt::format(" (every {} steps)", parallel.local_steps);
  if (plan::starts_late(parallel.comm_hook))
    return fmt::format(" (reductions are those before {} starts)", parallel.comm_hook);
  return "";
}

std::string StepText::totals() const {
  const Sent sent = sent_by(view_);
  std::string of_what = fmt::format("parameters {}, gradients {}", bytes_text(sent.parameters),
                                    sent.gradients ? bytes_text(*sent.gradients) : "-");
  if (sent.boundaries > 0) of_what += fmt::format(", between stages {}", bytes_text(sent.boundaries));
  if (sent.activations > 0) of_what += fmt::format(", within passes {}", bytes_text(sent.activations));
  const std::string obstacle = obstacle_to_recording(view_);
  const Action& action = action_at(program_, memory_.peak());
  report::Table table({{"per step"}, {"on a rank"}});
  const std::string all = sent.total() ? bytes_text(*sent.total()) : "-";
  table.add_row({"sends", sent.total() == 0 ? "nothing" : fmt::format("{}: {}", all, of_what) + hook_note()});
  table.add_row({"peak", fmt::format("{} at {}, {} of {}", bytes_text(memory_.total(memory_.peak())),
                                     memory_.peak(), action.kind, unit_name(program_, action.unit))});
  if (view_.planned) {
    const RunPlan& run = *view_.planned;
    const plan::RankBytes& needed = run.by_pp_rank[static_cast<size_t>(pp_rank_of(run, view_.rank))];
    std::vector<std::string> more;
    for (const auto& [bytes, what] : {std::pair{needed.step.for_loss, "for the loss"},
                                      {needed.step.in_backward, "a block backward"},
                                      {needed.step.decoded, "decoded weights"},
                                      {needed.exchanged, "read by others"},
                                      {needed.baseline, "process"}})
      if (bytes > 0) more.push_back(fmt::format("{} {}", what, bytes_text(bytes)));
    table.add_row({"in addition", "predicted: " + join(more, ", ")});
  }
  table.add_row({"CUDA graphs", obstacle.empty() ? "passes can be recorded" : "no: " + obstacle});
  return table.to_string(columns_);
}

/// The parts of memory at the peak, as bars.
std::string StepText::peak() const {
  constexpr int64_t kBar = 32;
  const HeldBytes& held = memory_.at(memory_.peak());
  const int64_t total = held.total();
  report::Table table({{"at the peak"}, {"bytes", Align::kRight}, {"share", Align::kRight}, {""}});
  for (const Role role : plan::all_values<Role>()) {
    if (held[role] == 0) continue;
    const double share = static_cast<double>(held[role]) / static_cast<double>(total);
    const auto length = std::max<int64_t>(1, static_cast<int64_t>(share * kBar + 0.5));
    table.add_row({std::string(name(role)), bytes_text(held[role]), fmt::format("{:.1f}%", 100.0 * share),
                   std::string(static_cast<size_t>(length), '#')});
  }
  table.add_row({"total", bytes_text(total), "", ""});
  return table.to_string(columns_);
}

std::string StepText::ranges() const {
  report::Table table({{fmt::format("rank {}", *view_.rank)},
                       {"elements", Align::kRight},
                       {"keeps from", Align::kRight},
                       {"to", Align::kRight},
                       {"updates from", Align::kRight},
                       {"to", Align::kRight}});
  for (const plan::ProgramUnit& unit : program_.units) {
    const Ranges of = ranges_of(*view_.planned, *view_.rank, unit.numel);
    table.add_row({unit.name, with_commas(unit.numel), with_commas(of.begin), with_commas(of.end),
                   with_commas(of.update_begin), with_commas(of.update_end)});
  }
  return table.to_string(columns_);
}

std::string StepText::to_string() {
  std::string text = heading() + passes();
  if (!program_.actions.empty()) text += "\n" + totals() + "\n" + peak();
  if (view_.rank) text += "\n" + ranges();
  return text;
}

}  // namespace

StepView planned_step(const RunPlan& run, std::optional<int64_t> rank) {
  if (rank && (*rank < 0 || *rank >= run.ranks)) {
    throw ConfigError("[cli.plan] --rank {} is outside {} ranks; use 0 to {}", *rank, run.ranks,
                      run.ranks - 1);
  }
  const plan::Config& config = run.config;
  const auto setting = plan::engine_setting(config, run.mesh, run.batch.accumulation, run.device);
  return {.program = plan::config_program(config, run.held, run.batch, setting, pp_rank_of(run, rank)),
          .name = config.name,
          .micro_batches = run.batch.accumulation,
          .planned = run,
          .rank = rank};
}

std::string planned_texts(const RunPlan& run) {
  const auto setting = plan::engine_setting(run.config, run.mesh, run.batch.accumulation, run.device);
  return plan::programs_to_text(plan::config_programs(run.config, run.held, run.batch, setting));
}

StepView step_from_text(const std::string& text, std::string name) {
  std::vector<plan::StepProgram> programs = plan::step_programs_from_text(text);
  for (size_t rank = 0; rank < programs.size(); ++rank) {
    try {
      if (programs[rank].actions.empty()) throw ConfigError("[cli.plan] {} has no actions", name);
      plan::verify(programs[rank]);
    } catch (const Error& error) {
      if (programs.size() == 1) throw;
      throw Error(error.exit_code(), fmt::format("rank {}: {}", rank, error.what()));
    }
  }
  StepView view{.program = std::move(programs.front()), .name = std::move(name)};
  if (programs.size() > 1) view.name += fmt::format(", rank 0 of {}", programs.size());
  std::set<int64_t> micro_batches;
  for (const Pass& pass : view.program.passes) {
    if (pass.micro_batch != Action::kOnceAStep) micro_batches.insert(pass.micro_batch);
  }
  view.micro_batches = std::ssize(micro_batches);
  return view;
}

std::string to_text(const StepView& view, bool all, int64_t columns) {
  return StepText(view, all, columns).to_string();
}

}  // namespace trireme::cli
