#include "trireme/report/run_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "trireme/base/text.h"
#include "trireme/report/page.h"
#include "trireme/report/page_parts.h"
#include "trireme/report/run_charts.h"
#include "trireme/report/run_figures.h"
#include "trireme/report/run_layout.h"
#include "trireme/report/step_line.h"

namespace trireme::report {
namespace {

using Facts = std::vector<std::pair<std::string, std::string>>;

std::string bytes_of(int64_t bytes) {
  return format_bytes(static_cast<double>(bytes));
}

std::string at_step(double step) {
  return "at step " + with_commas(static_cast<int64_t>(step));
}

/// "57 of 400 steps".
std::string progress_of(const RunFigures& figures) {
  const std::string of = figures.total_steps ? " of " + with_commas(*figures.total_steps) : "";
  const bool one = figures.total_steps.value_or(figures.steps) == 1;
  return with_commas(figures.steps) + of + (one ? " step" : " steps");
}

/// "exit code 5 (lost a peer or timed out)"; empty while there is none.
std::string exit_of(const Attempt& attempt, const PageOptions& options) {
  if (!attempt.exit_code) return {};
  return fmt::format("exit code {}{}", *attempt.exit_code, options.meaning(*attempt.exit_code));
}

/// The attempt's cause, if it says more than the exit code; else empty.
std::string cause_beside(const Attempt& attempt, const PageOptions& options) {
  if (!attempt.exit_code) return attempt.cause;
  const int code = *attempt.exit_code;
  return attempt.cause == fmt::format("ended with code {}{}", code, options.meaning(code)) ? ""
                                                                                           : attempt.cause;
}

std::string how_it_ended(const RunRecord& run, const RunFigures& figures, const PageOptions& options) {
  const Attempt& last = run.last_attempt();
  std::string text = progress_of(figures);
  switch (state_of_run(run)) {
    case RunState::kFinished:
      if (figures.wall_s > 0.0) {
        text += run.attempts.size() == 1 ? " in " : ", the last attempt in ";
        text += format_duration(figures.wall_s);
      }
      break;
    case RunState::kInterrupted:
    case RunState::kFailed:
      text += ", " + exit_of(last, options);
      break;
    case RunState::kRunning:
      text += " so far";
      break;
    case RunState::kNoEnd:
      text += "; it is still running, or was killed together with its launcher";
      break;
  }
  if (!last.ended.empty()) {
    text += ", ended " + time_text(last.ended);
  } else if (!run.written.empty()) {
    text += ", last record " + time_text(run.written);
  }
  return text;
}

/// "4, dp_shard=2 pp=2".
std::string ranks_of(const Attempt& attempt) {
  return attempt.ranks == 0 ? "-" : fmt::format("{}, {}", attempt.ranks, attempt.mesh);
}

/// Each command that another attempt was made with, once.
std::vector<std::string> commands_of(const RunRecord& run) {
  std::vector<std::string> commands = {run.facts.command};
  for (const Attempt& attempt : run.attempts) commands.push_back(attempt.command);
  std::vector<std::string> different;
  for (const std::string& command : commands) {
    if (!command.empty() && std::ranges::find(different, command) == different.end())
      different.push_back(command);
  }
  return different;
}

Markup draw_attempts(const RunRecord& run, const PageOptions& options) {
  if (run.attempts.size() < 2) return {};
  PageTable table{
      .titles = {"attempt", "ranks", "end", "resumed after", "last step", "repeated", "began", "ended"},
      .rows = {},
      .style = "attempts"};
  const auto number = [](const std::optional<int64_t>& value) { return value ? with_commas(*value) : "-"; };
  for (size_t i = 0; i < run.attempts.size(); ++i) {
    const Attempt& attempt = run.attempts[i];
    std::string end = exit_of(attempt, options);
    const std::string cause = cause_beside(attempt, options);
    if (!cause.empty()) end += (end.empty() ? "" : ": ") + cause;
    table.rows.push_back({std::to_string(i + 1), ranks_of(attempt), end.empty() ? "-" : end,
                          number(attempt.resumed_from), number(attempt.last_step), number(attempt.steps_lost),
                          time_text(attempt.started), time_text(attempt.ended)});
  }
  return draw_table(table);
}

/// How a run that has not finished goes on.
Markup way_on(const RunRecord& run) {
  const int64_t ranks = run.last_attempt().ranks;
  return run.has_checkpoints
             ? element("code", resume_command(run.path, ranks)) + " continues from its last checkpoint."
             : element("code", again_command(run.path, ranks)) + " trains again, from step 1.";
}

Markup draw_head(const RunRecord& run, const RunFigures& figures, const PageOptions& options) {
  const Attempt& last = run.last_attempt();
  Markup head = element("h1", Markup(run.name) + state_pill(state_of_run(run)));
  head += element("p", how_it_ended(run, figures, options));
  const std::string cause = cause_beside(last, options);
  if (last.exit_code != 0 && !cause.empty()) head += element("p", {{"class", "cause"}}, cause);
  if (last.exit_code.value_or(0) != 0) {
    if (!run.error.empty() && run.error != cause) head += element("p", {{"class", "cause"}}, run.error);
    head += element("p", way_on(run));
  }
  for (const std::string& command : commands_of(run)) head += element("p", element("code", command));
  head += element("p", {{"class", "quiet"}},
                  run.folder + (run.facts.started.empty() ? "" : ", began " + time_text(run.facts.started)));
  for (const std::string& problem : run.problems) head += element("p", {{"class", "warn"}}, problem);
  return element("header", head + draw_attempts(run, options));
}

/// A figure, what it is and what else there is to say of it.
Markup card(const std::string& title, const Markup& value, const std::string& note = {}) {
  return element("div", {{"class", "card"}},
                 element("b", title) + element("span", value) + element("i", note));
}

Markup loss_cards(const RunFigures& figures) {
  Markup cards;
  if (figures.loss)
    cards +=
        card("loss", format_value(Unit::kNumber, *figures.loss), at_step(static_cast<double>(figures.steps)));
  if (const auto& val = figures.val_loss) {
    const auto& best = figures.best_val_loss;
    const bool better_before = best && best->step != val->step;
    cards += card("validation loss", format_value(Unit::kNumber, val->value),
                  at_step(val->step) +
                      (better_before ? fmt::format(", best {} {}", format_value(Unit::kNumber, best->value),
                                                   at_step(best->step))
                                     : ""));
  }
  if (const auto& top = figures.val_top1) {
    const auto& best = figures.best_val_top1;
    std::string note = at_step(top->step);
    if (best && best->step != top->step)
      note += fmt::format(", best {} {}", format_value(Unit::kShare, best->value), at_step(best->step));
    if (figures.val_top5) note += ", top-5 " + format_value(Unit::kShare, figures.val_top5->value);
    cards += card("top-1 accuracy", format_value(Unit::kShare, top->value), note);
  }
  return cards;
}

std::string flops_text(double flops) {
  return flops < 1e11 ? fmt::format("{:.3g} GFLOP/s", flops * 1e-9)
                      : fmt::format("{:.3g} TFLOP/s", flops * 1e-12);
}

Markup speed_cards(const RunRecord& run, const RunFigures& figures, const RunLayout& layout) {
  Markup cards;
  if (figures.tokens_per_s) {
    std::string note;
    if (figures.tokens_range && figures.timed_steps > 1)
      note = fmt::format("90% of this run's steps: {} to {}", format_count(figures.tokens_range->low),
                         format_count(figures.tokens_range->high));
    cards += card(counted_in(run) + "/s", format_count(*figures.tokens_per_s), note);
  }
  if (figures.step_ms) {
    cards += card("step time", format_value(Unit::kMilliseconds, *figures.step_ms),
                  figures.timed_steps == 1
                      ? "of one step"
                      : fmt::format("median of {} steps, 95% below {}", with_commas(figures.timed_steps),
                                    format_value(Unit::kMilliseconds, *figures.step_ms_p95)));
  }
  if (figures.exposed_share && figures.communication_ms) {
    cards += card("exposed communication", format_value(Unit::kShare, *figures.exposed_share),
                  fmt::format("of the step; busy for {}",
                              format_value(Unit::kMilliseconds, *figures.communication_ms)));
  }
  const double per_rank =
      figures.tokens_per_s.value_or(0.0) / static_cast<double>(std::max<int64_t>(1, run.facts.ranks));
  if (layout.flops_per_token > 0.0 && per_rank > 0.0) {
    cards += card("compute", flops_text(per_rank * layout.flops_per_token), "per rank");
  }
  return cards;
}

std::string peak_note(const RunRecord& run, const RunLayout& layout) {
  const int64_t predicted = run.summary ? run.summary->cost.predicted_peak_bytes : 0;
  if (predicted > 0) return "of the largest rank; predicted " + bytes_of(predicted);
  return layout.predicted ? "of the largest rank; predicted " + bytes_of(layout.predicted->peak())
                          : "of the largest rank";
}

Markup end_cards(const RunRecord& run, const RunFigures& figures, const RunLayout& layout) {
  Markup cards;
  if (figures.peak_bytes > 0)
    cards += card("peak memory", bytes_of(figures.peak_bytes), peak_note(run, layout));
  if (figures.tokens > 0)
    cards += card("trained on",
                  fmt::format("{} {}", format_count(static_cast<double>(figures.tokens)), counted_in(run)),
                  progress_of(figures));
  if (run.summary && run.summary->seconds_to_first_step > 0.0)
    cards += card("first step after", format_duration(run.summary->seconds_to_first_step),
                  "from the start of the process");
  if (!figures.weights_digest.empty()) {
    cards += card("weights", element("code", figures.weights_digest),
                  figures.why_bits_vary.empty() ? "an identical run gives the same bits"
                                                : "bits may vary: " + figures.why_bits_vary);
  }
  return cards;
}

Markup draw_cards(const RunRecord& run, const RunFigures& figures, const RunLayout& layout) {
  const Markup cards =
      loss_cards(figures) + speed_cards(run, figures, layout) + end_cards(run, figures, layout);
  return cards.empty() ? cards : element("div", {{"class", "cards"}}, cards);
}

Markup draw_ends(const RunRecord& run) {
  Markup texts;
  for (const NamedText& report : run.crash_reports) texts += folded(report.name, element("pre", report.text));
  for (const NamedText& log : run.log_ends)
    texts += folded("the end of " + log.name, element("pre", log.text));
  return section("Last log lines of the ranks", texts);
}

/// A part of memory; 0: not known.
struct MemoryPart {
  std::string name;
  int64_t predicted = 0, measured = 0;
};

std::vector<MemoryPart> memory_parts(const RunRecord& run, const RunLayout& layout) {
  std::vector<MemoryPart> parts;
  if (run.summary && run.summary->cost.predicted_peak_bytes > 0) {
    const RunCost& cost = run.summary->cost;
    return {{"parameters", cost.predicted.parameters, cost.measured.parameters},
            {"gradients", cost.predicted.gradients, cost.measured.gradients},
            {"optimizer state", cost.predicted.optimizer, cost.measured.optimizer},
            {"activations of a micro-batch", cost.predicted_activation_bytes,
             cost.measured_activation_bytes.value_or(0)},
            {"gathered units in flight", cost.predicted_gathered_bytes, 0},
            {"process before the model", 0, cost.baseline_bytes},
            {"peak", cost.predicted_peak_bytes, run.summary->peak_bytes}};
  }
  if (!layout.predicted) return {};
  const plan::RankBytes& rank = *layout.predicted;
  const plan::StepPeak& step = rank.step;
  return {{"kept between steps", step.kept, 0},
          {"gathered or not yet reduced", step.gathered, 0},
          {"activations", step.activations, 0},
          {"buffers between stages", step.boundaries, 0},
          {"for the loss", step.for_loss, 0},
          {"a block that goes backward", step.in_backward, 0},
          {"weights in 4 bits, decoded for a product", step.decoded, 0},
          {"activations that others read", rank.exchanged, 0},
          {"process before the model", rank.baseline, 0},
          {"peak", rank.peak(), figures_of(run).peak_bytes}};
}

Markup share_bar(int64_t bytes, int64_t of, std::string_view style) {
  if (bytes <= 0) return {};
  const double share = 100.0 * static_cast<double>(bytes) / static_cast<double>(of);
  return element("span",
                 {{"class", fmt::format("share {}", style)}, {"style", fmt::format("width: {:.1f}%", share)}},
                 " ");
}

Markup draw_memory(const RunRecord& run, const RunLayout& layout) {
  std::vector<MemoryPart> parts = memory_parts(run, layout);
  std::erase_if(parts, [](const MemoryPart& part) { return part.predicted <= 0 && part.measured <= 0; });
  if (parts.empty()) return {};
  int64_t most = 1;
  for (const MemoryPart& part : parts) most = std::max({most, part.predicted, part.measured});
  PageTable table{.titles = {"", "predicted", "measured", ""}, .rows = {}, .style = "memory"};
  const auto text = [](int64_t bytes) { return bytes > 0 ? bytes_of(bytes) : std::string("-"); };
  for (const MemoryPart& part : parts) {
    table.rows.push_back(
        {part.name, text(part.predicted), text(part.measured),
         share_bar(part.predicted, most, "expected c0") + share_bar(part.measured, most, "c0")});
  }
  return draw_table(table) + element("p", {{"class", "note"}},
                                     "Values of rank 0, except the peak, which is that of the largest rank. "
                                     "Outlined: predicted; filled: measured.");
}

Facts wire_facts(const RunRecord& run) {
  Facts facts;
  if (!run.summary) return facts;
  const RunSummary& summary = *run.summary;
  const std::optional<int64_t> predicted = summary.cost.predicted_wire_bytes;
  if (summary.cost.measured_wire_bytes > 0 || predicted.value_or(0) > 0) {
    facts.emplace_back("sent by a rank per step",
                       fmt::format("{}{} measured", predicted ? bytes_of(*predicted) + " predicted, " : "",
                                   bytes_of(summary.cost.measured_wire_bytes)));
  }
  std::vector<std::string> peaks;
  for (const int64_t bytes : summary.peak_bytes_by_pp_rank) peaks.push_back(bytes_of(bytes));
  if (!peaks.empty()) facts.emplace_back("peak by pipeline rank", join(peaks, ", "));
  if (summary.checkpoints + summary.checkpoints_late + summary.checkpoints_failed > 0) {
    facts.emplace_back(
        "checkpoints",
        fmt::format("{} written, {} skipped because the previous one was still being written, {} failed",
                    summary.checkpoints, summary.checkpoints_late, summary.checkpoints_failed));
  }
  if (summary.early_end) facts.emplace_back("early stop", early_end_text(*summary.early_end));
  if (!summary.weights_path.empty()) facts.emplace_back("weights", summary.weights_path);
  if (!summary.best_weights_path.empty())
    facts.emplace_back("best weights",
                       fmt::format("{}, step {}", summary.best_weights_path, summary.best_step));
  return facts;
}

Markup draw_layout(const RunRecord& run, const RunLayout& layout) {
  Facts facts = layout.rows;
  for (auto& fact : wire_facts(run)) facts.push_back(std::move(fact));
  Markup content = facts.empty() ? Markup() : draw_facts(facts);
  if (!layout.problem.empty())
    content +=
        element("p", {{"class", "warn"}}, "This version cannot reconstruct the layout: " + layout.problem);
  return section("Layout", content);
}

Markup draw_environment(const RunRecord& run) {
  const RunFacts& facts = run.facts;
  Facts rows;
  const auto add = [&](const char* what, const std::string& value) {
    if (!value.empty()) rows.emplace_back(what, value);
  };
  add("host", facts.hostname);
  if (facts.cores > 0)
    add("CPU", fmt::format("{}{}{} cores, {} of memory", facts.cpu, facts.cpu.empty() ? "" : ", ",
                           facts.cores, bytes_of(facts.memory_bytes)));
  add("kernel", facts.kernel);
  add("device", facts.device);
  if (!facts.version.empty())
    add("versions", fmt::format("trireme {}, torch {}", facts.version, facts.torch));
  add("run directory", run.path);
  return rows.empty() ? Markup() : section("Environment", draw_facts(rows));
}

Markup config_table(const std::vector<ConfigEntry>& entries) {
  PageTable table{.titles = {"key", "value", "from"}, .rows = {}, .style = "config"};
  for (const ConfigEntry& entry : entries) table.rows.push_back({entry.key, entry.value, entry.origin});
  return draw_table(table);
}

/// The changes that each attempt made to the config of the one before.
Markup config_changes(const RunRecord& run) {
  PageTable table{.titles = {"key", "before", "after", "changed"}, .rows = {}, .style = "config differs"};
  for (size_t i = 0; i < run.earlier_configs.size(); ++i) {
    const std::string& name = run.earlier_configs[i].name;
    const auto later = i + 1 < run.earlier_configs.size()
                           ? read_config_entries(run.earlier_configs[i + 1].text)
                           : run.config;
    for (const ConfigEntry& before : read_config_entries(run.earlier_configs[i].text)) {
      const auto after = std::ranges::find(later, before.key, &ConfigEntry::key);
      const std::string value = after == later.end() ? "-" : after->value;
      if (value != before.value) table.rows.push_back({before.key, before.value, value, "after " + name});
    }
  }
  return table.rows.empty() ? Markup()
                            : element("p", "Changed when the run was resumed:") + draw_table(table);
}

Markup draw_config(const RunRecord& run) {
  if (run.config_yaml.empty()) return {};
  std::vector<ConfigEntry> given;
  std::ranges::copy_if(run.config, std::back_inserter(given), was_given);
  Markup content = config_changes(run);
  if (!given.empty())
    content += folded(fmt::format("{} values that were set", given.size()), config_table(given));
  content += run.config.empty()
                 ? folded("config.yaml", element("pre", run.config_yaml))
                 : folded(fmt::format("all {} values", run.config.size()), config_table(run.config));
  return section("Config", content);
}

Markup draw_pictures(const RunRecord& run) {
  Markup pictures;
  for (const PictureFile& picture : run.pictures) pictures += draw_picture(picture);
  return section("Pictures", pictures);
}

Markup draw_sample(const RunRecord& run) {
  if (!run.summary || run.summary->sample.empty()) return {};
  return section("Sample", element("pre", run.summary->sample));
}

}  // namespace

Markup draw_run(const RunRecord& run, const PageOptions& options) {
  const RunFigures figures = figures_of(run);
  const RunLayout layout = layout_of(run);
  const Markup charts = draw_run_charts(run);
  Markup body = draw_head(run, figures, options) + draw_cards(run, figures, layout) + draw_ends(run);
  body += charts.empty() ? element("p", {{"class", "quiet"}}, "No step was recorded.")
                         : section("Curves", note_below_title(sharing_note({run})) + charts);
  body += draw_pictures(run);
  body += section("Memory by part", draw_memory(run, layout));
  body += draw_layout(run, layout) + draw_sample(run) + draw_environment(run) + draw_config(run);
  return body;
}

}  // namespace trireme::report
