#include "trireme/cli/placement_view.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "trireme/base/text.h"
#include "trireme/cli/words.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using HeldJson = nlohmann::ordered_json;
using plan::HeldParameter;

/// Sums over the parameters of a rank.
struct HeldTotals {
  int64_t elements = 0, updated = 0, bytes = 0;
};

HeldTotals totals_of(const std::vector<HeldParameter>& params) {
  HeldTotals totals;
  for (const HeldParameter& param : params) {
    totals.elements += plan::Region::whole(param.held).numel();
    totals.updated += param.updated.size();
    totals.bytes += param.bytes;
  }
  return totals;
}

std::string shape_text(const plan::Shape& shape) {
  return shape.empty() ? "scalar" : fmt::format("{}", fmt::join(shape, " x "));
}

/// "dim 0: 0 to 511", "dim 1: 0 to 63 of each of 3", "replicated".
std::string part_text(const HeldParameter& param) {
  if (!param.cut) return param.copies > 1 ? "replicated" : "whole";
  std::string text = fmt::format("dim {}: {} to {}", *param.cut, param.part.begin, param.part.end - 1);
  if (param.packed > 1) text += fmt::format(" of each of {}", param.packed);
  if (param.copies > 1) text += fmt::format(", on {} ranks", param.copies);
  return text;
}

std::string updated_text(const HeldParameter& param) {
  if (param.updated.size() == 0) return "-";
  if (param.updated.size() == plan::Region::whole(param.held).numel()) return "all";
  return fmt::format("{} to {}", param.updated.begin, param.updated.end - 1);
}

HeldJson held_json(const HeldParameter& param) {
  return {{"name", param.name},
          {"unit", param.unit},
          {"stage", param.stage},
          {"whole_shape", param.whole},
          {"held_shape", param.held},
          {"placement", param.cut ? "shard" : "replicate"},
          {"dim", param.cut ? HeldJson(*param.cut) : HeldJson()},
          {"range", param.cut ? HeldJson({param.part.begin, param.part.end}) : HeldJson()},
          {"packed", param.packed},
          {"copies", param.copies},
          {"updated", {param.updated.begin, param.updated.end}},
          {"bytes", param.bytes}};
}

}  // namespace

std::string placement_table(const std::string& title, const std::vector<HeldParameter>& params,
                            int64_t columns) {
  using report::Align;
  report::Table table({{title},
                       {"stage", Align::kRight},
                       {"whole", Align::kRight},
                       {"along tp"},
                       {"held", Align::kRight},
                       {"updates", Align::kRight},
                       {"bytes", Align::kRight}});
  for (const HeldParameter& param : params) {
    table.add_row({param.name, std::to_string(param.stage), shape_text(param.whole), part_text(param),
                   shape_text(param.held), updated_text(param), bytes_text(param.bytes)});
  }
  const HeldTotals totals = totals_of(params);
  table.add_row({"total", "", "", "", with_commas(totals.elements), with_commas(totals.updated),
                 bytes_text(totals.bytes)});
  return table.to_string(columns);
}

std::string stage_text(const RunPlan& run, int64_t stage) {
  const plan::UnitRange range = plan::units_of_stage(run.pipeline->split, stage);
  if (range.vocabulary) return "a part of the head";
  const auto name = [&](int64_t unit) {
    return unit < std::ssize(run.facts.units) ? run.facts.units[static_cast<size_t>(unit)].name
                                              : std::string(plan::kHeadUnit);
  };
  const int64_t last = range.end - 1;
  const std::string begin = name(range.first) + (range.from_mlp ? plan::kMlpHalf : ""),
                    end = name(last) + (range.to_attention ? plan::kAttentionHalf : "");
  return fmt::format("{}: {}", stage, begin == end ? begin : fmt::format("{} to {}", begin, end));
}

HeldJson placement_json(const std::vector<HeldParameter>& params) {
  HeldJson rows = HeldJson::array();
  for (const HeldParameter& param : params) rows.push_back(held_json(param));
  const HeldTotals totals = totals_of(params);
  return {{"parameters", rows},
          {"totals", {{"held", totals.elements}, {"updated", totals.updated}, {"bytes", totals.bytes}}}};
}

}  // namespace trireme::cli
