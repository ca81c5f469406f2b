#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "trireme/base/terminal.h"
#include "trireme/base/text.h"
#include "trireme/cli/front.h"
#include "trireme/plan/model_facts.h"
#include "trireme/plan/model_family.h"
#include "trireme/plan/presets.h"
#include "trireme/report/table.h"

namespace trireme::cli {
namespace {

using Json = nlohmann::ordered_json;
using report::Align;

int64_t parameters(const plan::Preset& preset) {
  return plan::describe(preset.model, plan::DataConfig{}.seq_len).params;
}

Json to_json(const plan::Preset& preset) {
  const plan::ModelConfig& model = preset.model;
  Json row = {{"name", preset.name}, {"family", plan::name(model.family)}, {"n_layers", model.n_layers}};
  if (plan::reads_images(model.family)) {
    row["classes"] = model.vision.classes;
    row["channels"] = model.vision.channels;
    row["image_size"] = model.vision.image_size;
  } else {
    row["d_model"] = model.d_model;
    row["n_heads"] = model.n_heads;
    row["vocab_size"] = model.vocab_size;
  }
  row["params"] = parameters(preset);
  row["summary"] = preset.summary;
  return row;
}

void print_json() {
  Json rows = Json::array();
  for (const plan::Preset& preset : plan::presets()) rows.push_back(to_json(preset));
  fmt::print("{}\n", Json{{"schema", "trireme.presets/1"}, {"presets", rows}}.dump(2));
}

void print_table() {
  report::Table table({{"name"},
                       {"family"},
                       {"blocks", Align::kRight},
                       {"d_model", Align::kRight},
                       {"heads", Align::kRight},
                       {"parameters", Align::kRight},
                       {"summary"}});
  for (const plan::Preset& preset : plan::presets()) {
    const plan::ModelConfig& model = preset.model;
    const plan::ModelFamilyRecord& family = plan::record_of(model.family);
    const bool images = plan::reads_images(model.family);
    table.add_row({preset.name, std::string(plan::name(model.family)), std::to_string(model.n_layers),
                   images ? "-" : std::to_string(model.d_model),
                   family.attends ? std::to_string(model.n_heads) : "-",
                   format_count(static_cast<double>(parameters(preset))), preset.summary});
  }
  fmt::print("{}", table.to_string(terminal_columns(STDOUT_FILENO)));
}

}  // namespace

void add_presets(CLI::App& app, Front& front) {
  auto json = std::make_shared<bool>(false);
  CLI::App* verb =
      app.add_subcommand("presets", "List the built-in models (use one with --model.preset=NAME)");
  verb->add_flag("--json", *json, "Print one JSON document");
  verb->callback([json, &front] {
    front.action = [json] {
      *json ? print_json() : print_table();
      return 0;
    };
  });
}

}  // namespace trireme::cli
