#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string_view>

#include "trireme/base/build_info.h"
#include "trireme/cli/front.h"

namespace trireme::cli {
namespace {

int version(bool json) {
  if (!json) {
    fmt::print("{}\n", version_line());
    return 0;
  }
  const nlohmann::ordered_json document = {{"schema", "trireme.version/1"}, {"version", kVersion},
                                           {"build_type", kBuildType},      {"compiler", kCompiler},
                                           {"torch", kTorchVersion},        {"cuda", kHasCuda}};
  fmt::print("{}\n", document.dump(2));
  return 0;
}

}  // namespace

std::string version_line() {
  const std::string torch =
      std::string_view(kTorchVersion).empty() ? "no torch" : fmt::format("torch {}", kTorchVersion);
  return fmt::format("trireme {} ({}, {}, {}, {})", kVersion, kBuildType, kCompiler, torch,
                     kHasCuda ? "CUDA" : "no CUDA");
}

void add_version(CLI::App& app, Front& front) {
  auto json = std::make_shared<bool>(false);
  CLI::App* verb = app.add_subcommand("version", "Print the version and what this build contains");
  verb->add_flag("--json", *json, "Print one JSON document");
  verb->callback([json, &front] { front.action = [json] { return version(*json); }; });
}

}  // namespace trireme::cli
