#include "trireme/report/pipeline_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "trireme/base/file.h"
#include "trireme/base/text.h"
#include "trireme/report/table.h"

namespace trireme::report {
namespace {

using OrderedJson = nlohmann::ordered_json;
using plan::ActionKind;
using plan::IdleCause;
using plan::PipelineReport;
using plan::RankUse;
using plan::Schedule;
using plan::StageEvent;
using plan::StageEvents;
using plan::StagePass;
using plan::StepUse;

/// Which of its stages a rank runs in this pass, from 0.
int64_t chunk_of(const Schedule& schedule, const StagePass& pass) {
  if (schedule.placement == plan::Placement::kTwoWays)
    return pass.micro_batch < schedule.micro_batches / 2 ? 0 : 1;
  return pass.stage / static_cast<int64_t>(schedule.ranks.size());
}

std::string percent(double part, double whole) {
  return fmt::format("{:.1f}%", whole > 0.0 ? 100.0 * part / whole : 0.0);
}

std::string bytes_text(double bytes) {
  return bytes > 0.0 ? format_bytes(bytes) : "-";
}

std::string stages_of(const Schedule& schedule, size_t rank) {
  std::vector<std::string> stages;
  for (const int64_t stage : schedule.stages_of(static_cast<int64_t>(rank)))
    stages.push_back(std::to_string(stage));
  return join(stages, ", ");
}

/// Measured beside simulated, where both are of the same ranks.
std::string rank_table(const PipelineReport& report, int64_t columns) {
  const bool same = report.measured.ranks.size() == report.predicted.ranks.size();
  std::vector<Column> titles = {{"rank", Align::kRight}, {"stages"}, {"busy", Align::kRight}};
  const auto simulated = [&] {
    if (same) titles.push_back({"simulated", Align::kRight});
  };
  simulated();
  titles.push_back({"idle", Align::kRight});
  for (size_t cause = 0; cause < plan::kIdleCauses; ++cause)
    titles.push_back({std::string(plan::name(static_cast<IdleCause>(cause))), Align::kRight});
  for (const char* title : {"in flight", "sent"}) {
    titles.push_back({title, Align::kRight});
    simulated();
  }
  Table table(std::move(titles));
  for (size_t rank = 0; rank < report.measured.ranks.size(); ++rank) {
    const RankUse& use = report.measured.ranks[rank];
    const RankUse wanted = same ? report.predicted.ranks[rank] : RankUse();
    const double seconds = report.measured.seconds;
    std::vector<std::string> cells = {std::to_string(rank), stages_of(report.schedule, rank),
                                      percent(use.busy, seconds)};
    const auto beside = [&](const std::string& text) {
      if (same) cells.push_back(text);
    };
    beside(percent(wanted.busy, report.predicted.seconds));
    cells.push_back(percent(use.idle, seconds));
    for (const double part : use.idle_causes) cells.push_back(percent(part, seconds));
    cells.push_back(bytes_text(use.peak_bytes));
    beside(bytes_text(wanted.peak_bytes));
    cells.push_back(bytes_text(use.sent_bytes));
    beside(bytes_text(wanted.sent_bytes));
    table.add_row(std::move(cells));
  }
  if (same) return table.to_string(columns);
  Table others({{"simulated rank", Align::kRight},
                {"stages"},
                {"busy", Align::kRight},
                {"in flight", Align::kRight},
                {"sent", Align::kRight}});
  for (size_t rank = 0; rank < report.predicted.ranks.size(); ++rank) {
    const RankUse& use = report.predicted.ranks[rank];
    others.add_row({std::to_string(rank), stages_of(report.simulated, rank),
                    percent(use.busy, report.predicted.seconds), bytes_text(use.peak_bytes),
                    bytes_text(use.sent_bytes)});
  }
  return table.to_string(columns) + others.to_string(columns);
}

std::string ms(double seconds) {
  return fmt::format("{:.3f}", 1e3 * seconds);
}

/// "3", or "3 (2)" where another depth was simulated.
std::string depth(int64_t measured, int64_t predicted) {
  if (measured == 0 && predicted == 0) return "-";
  return measured == predicted ? std::to_string(measured) : fmt::format("{} ({})", measured, predicted);
}

std::string stage_table(const PipelineReport& report, int64_t columns) {
  Table table({{"stage", Align::kRight},
               {"busy", Align::kRight},
               {"forward ms", Align::kRight},
               {"backward ms", Align::kRight},
               {"weights ms", Align::kRight},
               {"activations", Align::kRight},
               {"forward queue", Align::kRight},
               {"backward queue", Align::kRight}});
  for (size_t stage = 0; stage < report.measured.stages.size(); ++stage) {
    const plan::StageUse &use = report.measured.stages[stage], &wanted = report.predicted.stages[stage];
    const double weights = report.costs.backward_weight[stage];
    table.add_row({std::to_string(stage), percent(use.busy, report.measured.seconds),
                   ms(report.costs.forward[stage]), ms(report.costs.backward_input[stage]),
                   weights > 0.0 ? ms(weights) : "-", bytes_text(report.costs.activation_bytes[stage]),
                   depth(use.forward_queue, wanted.forward_queue),
                   depth(use.backward_queue, wanted.backward_queue)});
  }
  return table.to_string(columns);
}

OrderedJson to_json(const StepUse& use, bool with_causes) {
  OrderedJson ranks = OrderedJson::array(), stages = OrderedJson::array();
  for (const RankUse& rank : use.ranks) {
    OrderedJson row = {{"busy_s", rank.busy},
                       {"idle_s", rank.idle},
                       {"peak_activation_bytes", rank.peak_bytes},
                       {"sent_bytes", rank.sent_bytes}};
    for (size_t cause = 0; with_causes && cause < plan::kIdleCauses; ++cause)
      row["idle_causes_s"][std::string(plan::name(static_cast<IdleCause>(cause)))] = rank.idle_causes[cause];
    ranks.push_back(std::move(row));
  }
  for (const plan::StageUse& stage : use.stages) {
    stages.push_back({{"busy_s", stage.busy},
                      {"busy_share", use.seconds > 0.0 ? stage.busy / use.seconds : 0.0},
                      {"forward_queue", stage.forward_queue},
                      {"backward_queue", stage.backward_queue}});
  }
  return {{"seconds", use.seconds}, {"idle_share", use.idle_share()}, {"ranks", ranks}, {"stages", stages}};
}

/// Bars of passes, in ms.
std::vector<Bar> bars_of(const Schedule& schedule, const std::vector<StageEvent>& events) {
  std::vector<Bar> bars;
  for (const StageEvent& event : events) {
    if (event.is_pass()) bars.push_back(bar_of(schedule, event.pass(), 1e3 * event.begin, 1e3 * event.end));
  }
  return bars;
}

std::string heading(const PipelineReport& report, bool measured) {
  if (!measured) return "simulated with the measured costs";
  return report.schedule.ranks.size() == report.simulated.ranks.size()
             ? "measured"
             : fmt::format("measured, for study: all {} stages on one device, one after the other",
                           report.schedule.stages);
}

void add_rows(Timeline& timeline, const PipelineReport& report, bool measured) {
  const StepUse& use = measured ? report.measured : report.predicted;
  const Schedule& schedule = measured ? report.schedule : report.simulated;
  for (size_t rank = 0; rank < use.ranks.size(); ++rank) {
    TimelineRow row{.name = fmt::format("rank {}", rank),
                    .bars = bars_of(schedule, (measured ? report.events : report.ideal)[rank]),
                    .note = fmt::format("idle {}", percent(use.ranks[rank].idle, use.seconds))};
    row.end = 1e3 * use.seconds;
    if (rank == 0) {
      row.heading = fmt::format("{}: {:.2f} ms, {:.1f}% idle", heading(report, measured), 1e3 * use.seconds,
                                100.0 * use.idle_share());
    }
    for (const plan::IdleSpan& span : measured ? report.idle[rank] : std::vector<plan::IdleSpan>()) {
      row.gaps.push_back({.begin = 1e3 * span.begin,
                          .end = 1e3 * span.end,
                          .label = "idle",
                          .kind = static_cast<size_t>(span.cause)});
    }
    timeline.rows.push_back(std::move(row));
  }
}

/// Events of trace_of() for one process, the measured or the simulated.
class Trace {
 public:
  Trace(const PipelineReport& report, OrderedJson& events) : report_(report), out_(events) {}

  void add(bool measured) {
    pid_ = measured ? 0 : 1;
    const StageEvents& events = measured ? report_.events : report_.ideal;
    name("process_name", 0, measured ? "measured" : "simulated with the measured costs");
    for (size_t rank = 0; rank < events.size(); ++rank) {
      name("thread_name", passes_of(rank), fmt::format("rank {}", rank));
      if (measured)
        name("thread_name", passes_of(rank) + 1, fmt::format("rank {}, messages and updates", rank));
      for (const StageEvent& event : events[rank]) add(rank, event, measured);
      count_activations(rank, events[rank]);
    }
    if (!measured) return;
    for (size_t rank = 0; rank < events.size(); ++rank) {
      for (const plan::IdleSpan& span : report_.idle[rank])
        slice(passes_of(rank), fmt::format("idle: {}", plan::name(span.cause)), "idle", span.begin, span.end,
              {});
    }
    arrows(events);
  }

 private:
  static int64_t passes_of(size_t rank) { return 2 * static_cast<int64_t>(rank) + 1; }

  void name(const char* what, int64_t thread, const std::string& text) {
    out_.push_back({{"ph", "M"}, {"name", what}, {"pid", pid_}, {"tid", thread}, {"args", {{"name", text}}}});
  }
  void slice(int64_t thread, const std::string& text, const std::string& category, double begin, double end,
             const OrderedJson& args) {
    OrderedJson event = {{"ph", "X"},     {"name", text},      {"cat", category},           {"pid", pid_},
                         {"tid", thread}, {"ts", 1e6 * begin}, {"dur", 1e6 * (end - begin)}};
    if (!args.empty()) event["args"] = args;
    out_.push_back(std::move(event));
  }
  void add(size_t rank, const StageEvent& event, bool measured) {
    if (event.is_pass()) {
      slice(passes_of(rank), plan::to_text(event.pass()), pass_kinds()[plan::pass_index(event.kind)],
            event.begin, event.end, {{"stage", event.stage}, {"micro_batch", event.micro_batch}});
      return;
    }
    if (!measured) return;
    const std::string message =
        fmt::format("{}{}{}", event.stage, plan::letter_of(event.message), event.micro_batch);
    switch (event.kind) {
      case ActionKind::kSend:
        return slice(passes_of(rank) + 1, "send " + message, "send", event.begin, event.end,
                     {{"bytes", event.bytes}});
      case ActionKind::kRecv:
        return slice(passes_of(rank) + 1, "wait for " + message, "wait", event.begin, event.end, {});
      default:
        return slice(passes_of(rank) + 1, event.kind == ActionKind::kReduce ? "reduce" : "update", "update",
                     event.begin, event.end, {});
    }
  }
  void count_activations(size_t rank, const std::vector<StageEvent>& events) {
    std::map<std::pair<int64_t, int64_t>, double> held;
    double sum = 0.0;
    for (const StageEvent& event : events) {
      if (!event.is_pass()) continue;
      double& mine = held[{event.stage, event.micro_batch}];
      const double before = mine;
      mine = event.kind == ActionKind::kForward         ? std::max(0.0, event.bytes)
             : event.kind == ActionKind::kBackwardInput ? std::clamp(mine + event.bytes, 0.0, mine)
                                                        : 0.0;
      sum += mine - before;
      out_.push_back({{"ph", "C"},
                      {"name", fmt::format("activations of rank {}", rank)},
                      {"pid", pid_},
                      {"ts", 1e6 * event.end},
                      {"args", {{"bytes", sum}}}});
    }
  }
  /// Draws arrows from the pass that made a message to the one that needs it.
  void arrows(const StageEvents& events) {
    std::map<std::tuple<plan::Message, int64_t, int64_t>, std::pair<size_t, double>> made;
    const auto each = [&](const auto& edges_of, const auto& use) {
      for (size_t rank = 0; rank < events.size(); ++rank) {
        for (const StageEvent& event : events[rank]) {
          if (!event.is_pass()) continue;
          for (const plan::StageEdge& edge : edges_of(report_.schedule, event.pass())) use(rank, event, edge);
        }
      }
    };
    each(plan::made_by, [&](size_t rank, const StageEvent& event, const plan::StageEdge& edge) {
      made[{edge.message, edge.stage, event.micro_batch}] = {rank, 0.5 * (event.begin + event.end)};
    });
    each(plan::needed_by, [&](size_t rank, const StageEvent& event, const plan::StageEdge& edge) {
      const auto from = made.find({edge.message, edge.stage, event.micro_batch});
      if (from == made.end() || from->second.first == rank) return;
      const OrderedJson common = {{"name", "message"}, {"cat", "message"}, {"id", arrows_++}, {"pid", pid_}};
      OrderedJson begin = common, end = common;
      begin.update({{"ph", "s"}, {"tid", passes_of(from->second.first)}, {"ts", 1e6 * from->second.second}});
      end.update(
          {{"ph", "f"}, {"bp", "e"}, {"tid", passes_of(rank)}, {"ts", 0.5e6 * (event.begin + event.end)}});
      out_.push_back(std::move(begin));
      out_.push_back(std::move(end));
    });
  }

  const PipelineReport& report_;
  OrderedJson& out_;
  int64_t pid_ = 0, arrows_ = 0;
};

}  // namespace

std::vector<std::string> pass_kinds() {
  return {"forward", "backward", "backward, input", "backward, weights"};
}

Bar bar_of(const Schedule& schedule, const StagePass& pass, double begin, double end) {
  const int64_t chunk = chunk_of(schedule, pass), stages = schedule.stages_per_rank();
  std::string label = plan::to_text(pass);
  const bool of_head = schedule.is_head_part(pass.stage);
  if (of_head) {
    const bool forward = pass.kind == ActionKind::kForward;
    label = fmt::format("{}{}", forward ? "H" : "h", pass.micro_batch);
  } else if (stages <= 2) {
    label = label.substr(label.find_first_not_of("0123456789"));
    if (chunk == 1) label[0] = static_cast<char>(std::tolower(label[0]));
  }
  return {.begin = begin,
          .end = end,
          .label = std::move(label),
          .kind = plan::pass_index(pass.kind),
          .shade = of_head ? 0.75 : static_cast<double>(chunk) / static_cast<double>(stages)};
}

std::string to_text(const PipelineReport& report, int64_t columns) {
  std::string text = fmt::format(
      "{}, one step: {} ms, simulated with the measured costs {} ms; {:.1f}% idle, simulated {:.1f}%\n",
      report.schedule.name, ms(report.measured.seconds), ms(report.predicted.seconds),
      100.0 * report.measured.idle_share(), 100.0 * report.predicted.idle_share());
  if (report.clock_error_s > 0.0)
    text += fmt::format("the clocks of the ranks differ by up to {} ms\n", ms(report.clock_error_s));
  return text + rank_table(report, columns) + stage_table(report, columns);
}

OrderedJson to_json(const PipelineReport& report) {
  return {{"schedule", report.schedule.name},
          {"measured", to_json(report.measured, /*with_causes=*/true)},
          {"simulated", to_json(report.predicted, /*with_causes=*/false)},
          {"costs",
           {{"forward_s", report.costs.forward},
            {"backward_input_s", report.costs.backward_input},
            {"backward_weight_s", report.costs.backward_weight},
            {"transfer_s", report.costs.transfer},
            {"activation_bytes", report.costs.activation_bytes},
            {"between_halves_bytes", report.costs.between_halves_bytes}}},
          {"after_s", report.after_s},
          {"clock_error_s", report.clock_error_s}};
}

Timeline timeline_of(const PipelineReport& report) {
  const Schedule& schedule = report.simulated;
  Timeline timeline;
  timeline.title = fmt::format("{}: {} ranks, {} stages, {} micro-batches", schedule.name,
                               schedule.ranks.size(), schedule.stages, schedule.micro_batches);
  timeline.kinds = pass_kinds();
  timeline.unit = "ms";
  for (size_t cause = 0; cause < plan::kIdleCauses; ++cause)
    timeline.causes.emplace_back(plan::name(static_cast<IdleCause>(cause)));
  add_rows(timeline, report, /*measured=*/false);
  add_rows(timeline, report, /*measured=*/true);
  return timeline;
}

std::string trace_of(const PipelineReport& report) {
  OrderedJson events = OrderedJson::array();
  Trace trace(report, events);
  trace.add(/*measured=*/true);
  trace.add(/*measured=*/false);
  return OrderedJson{{"displayTimeUnit", "ms"}, {"traceEvents", events}}.dump() + "\n";
}

void write_pictures(const PipelineReport& report, const std::string& directory, const std::string& name) {
  make_directories(directory);
  write_file_atomic(fmt::format("{}/{}.svg", directory, name), draw_svg(timeline_of(report)));
  write_file_atomic(fmt::format("{}/{}.trace.json", directory, name), trace_of(report));
}

}  // namespace trireme::report
