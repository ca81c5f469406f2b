#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "trireme/base/build_info.h"
#include "trireme/base/clock.h"
#include "trireme/base/error.h"
#include "trireme/base/text.h"
#include "trireme/report/page_parts.h"
#include "trireme/report/run_charts.h"
#include "trireme/report/run_figures.h"
#include "trireme/report/run_page.h"

namespace trireme::report {
namespace {

const std::string kNotThere = "-";

template <typename Format>
std::string cell_of(const std::optional<double>& value, Format format) {
  return value ? format(*value) : kNotThere;
}

std::string cell_in(Unit unit, const std::optional<double>& value) {
  return cell_of(value, [&](double number) { return format_value(unit, number); });
}

std::string cell_in(Unit unit, const std::optional<AtStep>& at) {
  return at ? format_value(unit, at->value) : kNotThere;
}

/// "19.4k (1.08x, 1.05x to 1.10x)": beside the median of the first run, this run's median and 90% of its
/// steps. Images and tokens have no ratio. `unit` stands behind the number.
std::string throughput_cell(const RunFigures& figures, const RunFigures& first, bool compares,
                            const std::string& unit) {
  std::string text = cell_of(figures.tokens_per_s, format_count);
  if (figures.tokens_per_s) text += unit;
  if (!compares || !figures.tokens_range || !first.tokens_per_s || *first.tokens_per_s <= 0.0) return text;
  const double base = *first.tokens_per_s;
  text += fmt::format(" ({:.2f}x", *figures.tokens_per_s / base);
  if (figures.timed_steps > 1) {
    text += fmt::format(", {:.2f}x to {:.2f}x", figures.tokens_range->low / base,
                        figures.tokens_range->high / base);
  }
  return text + ")";
}

Markup draw_figures(const std::vector<RunRecord>& runs, const std::vector<std::string>& names) {
  std::vector<RunFigures> all;
  for (const RunRecord& run : runs) all.push_back(figures_of(run));
  const bool accuracy =
      std::ranges::any_of(all, [](const RunFigures& run) { return run.val_top1.has_value(); });
  PageTable table{.titles = {"run", "", "steps", "loss", "val loss", "best"}, .rows = {}, .style = "numbers"};
  if (accuracy) table.titles.emplace_back("top-1");
  const bool same = count_the_same(runs);
  const std::string throughput = same ? counted_in(runs) + "/s" : "throughput";
  table.titles.emplace_back(throughput);
  for (const char* title : {"step time", "95% below", "exposed", "peak memory", "weights"})
    table.titles.emplace_back(title);
  for (size_t i = 0; i < runs.size(); ++i) {
    const RunFigures& run = all[i];
    std::vector<Markup> row = {colour_box(i) + names[i],
                               state_pill(state_of_run(runs[i])),
                               with_commas(run.steps),
                               cell_in(Unit::kNumber, run.loss),
                               cell_in(Unit::kNumber, run.val_loss),
                               cell_in(Unit::kNumber, run.best_val_loss)};
    if (accuracy) row.emplace_back(cell_in(Unit::kShare, run.val_top1));
    const bool compares = i > 0 && counted_in(runs[i]) == counted_in(runs.front());
    const std::string unit = same ? "" : " " + counted_in(runs[i]) + "/s";
    row.emplace_back(throughput_cell(run, all.front(), compares, unit));
    row.emplace_back(cell_in(Unit::kMilliseconds, run.step_ms));
    row.emplace_back(cell_in(Unit::kMilliseconds, run.step_ms_p95));
    row.emplace_back(cell_in(Unit::kShare, run.exposed_share));
    row.emplace_back(run.peak_bytes > 0 ? format_bytes(static_cast<double>(run.peak_bytes)) : kNotThere);
    row.push_back(run.weights_digest.empty() ? Markup(kNotThere) : element("code", run.weights_digest));
    table.rows.push_back(std::move(row));
  }
  return draw_table(table) +
         element("p", {{"class", "note"}},
                 throughput +
                     ", step time and exposed communication are medians without the warm-up. In parentheses: "
                     "beside the first run's median, this run's median and where 90% of its steps lie.");
}

/// Whether runs that ended with weights ended with the same ones.
std::string digest_note(const std::vector<RunRecord>& runs) {
  std::map<std::string, int64_t> digests;
  for (const RunRecord& run : runs) {
    if (run.summary && !run.summary->weights_digest.empty()) ++digests[run.summary->weights_digest];
  }
  const bool all = digests.size() == 1 && digests.begin()->second == std::ssize(runs);
  return all ? "All ended with the same weights, bit for bit." : "";
}

using Values = std::map<std::string, std::string>;

struct Setting {
  std::string key, value;
  bool given = false;  ///< by a user or a machine; else a default, or derived from others
};

/// The config, and what of the machine and the launch may make a difference.
std::vector<Setting> settings_of(const RunRecord& run) {
  const RunFacts& facts = run.facts;
  std::vector<Setting> settings = {{"ranks", std::to_string(facts.ranks), true},
                                   {"mesh", facts.mesh, true},
                                   {"device", facts.device, true},
                                   {"host", facts.hostname, true},
                                   {"CPU", facts.cpu, true},
                                   {"trireme", facts.version, true},
                                   {"torch", facts.torch, true}};
  for (const ConfigEntry& entry : run.config) {
    // An origin that is not said may be a user. model.preset stands for what it sets.
    const bool given = entry.origin.empty() || (was_given(entry) && !entry.origin.starts_with("preset "));
    if (entry.key != "device") settings.push_back({entry.key, entry.value, given});
  }
  return settings;
}

/// The values of all runs for one key.
struct Difference {
  std::vector<Markup> row;
  bool given = false;  ///< in one of them at least
};

std::vector<Difference> differences_between(const std::vector<RunRecord>& runs) {
  std::vector<std::string> keys;  // in the order in which they are met
  std::set<std::string> known, given;
  std::vector<Values> values;
  for (const RunRecord& run : runs) {
    values.emplace_back();
    for (Setting& setting : settings_of(run)) {
      if (known.insert(setting.key).second) keys.push_back(setting.key);
      if (setting.given) given.insert(setting.key);
      values.back()[setting.key] = std::move(setting.value);
    }
  }
  std::vector<Difference> differences;
  for (const std::string& key : keys) {
    Difference difference{.row = {key}, .given = given.contains(key)};
    std::set<std::string> different;
    for (const Values& of : values) {
      const auto found = of.find(key);
      different.insert(found == of.end() ? kNotThere : found->second);
      difference.row.emplace_back(found == of.end() ? kNotThere : found->second);
    }
    if (different.size() > 1) differences.push_back(std::move(difference));
  }
  return differences;
}

Markup draw_differences(const std::vector<RunRecord>& runs, const std::vector<std::string>& names) {
  PageTable given{.titles = {"key"}, .rows = {}, .style = "config differs"};
  for (size_t i = 0; i < runs.size(); ++i) given.titles.push_back(colour_box(i) + names[i]);
  PageTable derived = given;
  for (Difference& difference : differences_between(runs))
    (difference.given ? given : derived).rows.push_back(std::move(difference.row));
  if (given.rows.empty() && derived.rows.empty())
    return element("p", "Nothing: ranks, machine, versions and every value of the config are equal.");
  Markup drawn = given.rows.empty() ? Markup() : draw_table(given);
  if (!derived.rows.empty()) {
    drawn += folded(fmt::format("{} more that are defaults, derived or a preset's", derived.rows.size()),
                    draw_table(derived));
  }
  return drawn;
}

Markup draw_what_they_are(const std::vector<RunRecord>& runs, const std::vector<std::string>& names,
                          const PageOptions& options) {
  PageTable table{.titles = {"run", "folder", "command", "end"}, .rows = {}, .style = "runs"};
  for (size_t i = 0; i < runs.size(); ++i) {
    const Attempt& last = runs[i].last_attempt();
    std::string end = time_text(last.ended);
    if (last.exit_code.value_or(0) != 0)
      end += fmt::format(", exit code {}{}", *last.exit_code, options.meaning(*last.exit_code));
    if (!last.cause.empty()) end += ": " + last.cause;
    table.rows.push_back(
        {colour_box(i) + names[i], runs[i].path, element("code", runs[i].facts.command), end});
  }
  return draw_table(table);
}

}  // namespace

std::vector<std::string> names_of(const std::vector<RunRecord>& runs) {
  std::vector<std::string> names;
  for (const RunRecord& run : runs) {
    const auto same = std::ranges::count(runs, run.name, &RunRecord::name);
    const auto same_folder = std::ranges::count(runs, run.folder, &RunRecord::folder);
    names.push_back(same == 1 ? run.name : same_folder == 1 ? run.folder : run.path);
  }
  return names;
}

Markup draw_comparison(const std::vector<RunRecord>& runs, const PageOptions& options) {
  const std::vector<std::string> names = names_of(runs);
  Markup body = element("h1", fmt::format("{} runs", runs.size()));
  if (const std::string note = digest_note(runs); !note.empty()) body += element("p", note);
  for (size_t i = 0; i < runs.size(); ++i) {
    for (const std::string& problem : runs[i].problems)
      body += element("p", {{"class", "warn"}}, names[i] + ": " + problem);
  }
  body += draw_figures(runs, names);
  body += section("What differs", draw_differences(runs, names));
  body += section("Curves", note_below_title(sharing_note(runs)) + draw_compared_charts(runs, names));
  body += section("Runs", draw_what_they_are(runs, names, options));
  return body;
}

std::string run_page(const std::vector<RunRecord>& runs, const PageOptions& options) {
  TRIREME_CHECK(!runs.empty(), "[report.page] a page needs a run");
  const bool one = runs.size() == 1;
  const std::vector<std::string> names = names_of(runs);
  const Markup body = one ? draw_run(runs.front(), options) : draw_comparison(runs, options);
  const Markup foot =
      element("footer", fmt::format("trireme {} report, {}", kVersion, time_text(utc_timestamp())));
  return whole_page(one ? names.front() : join(names, ", "), body + foot);
}

}  // namespace trireme::report
