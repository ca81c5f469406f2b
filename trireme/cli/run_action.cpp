#include "trireme/cli/run_action.h"

#include <nlohmann/json.hpp>

#include "trireme/base/error.h"

namespace trireme::cli {
namespace {

using ActionJson = nlohmann::json;

constexpr auto kReplace = ActionJson::error_handler_t::replace;  // a sample of bytes may be no UTF-8

/// The document as `read` takes it.
template <typename Read>
auto parsed_action(const std::string& text, const Read& read) {
  try {
    return read(ActionJson::parse(text));
  } catch (const ActionJson::exception& error) {
    throw CommError("[cli.controller] what came is no action of a run: {}; use one build for all processes",
                    error.what());
  }
}

}  // namespace

std::string to_json(const RunAction& action) {
  ActionJson json = {
      {"kind", static_cast<int>(action.kind)}, {"steps", action.steps}, {"stop_signal", action.stop_signal}};
  if (action.kind == RunAction::Kind::kBuild) json["request"] = to_json(action.request);
  return json.dump();
}

std::string to_json(const RunAnswer& answer) {
  const ActionJson json = {{"is_over", answer.is_over},
                           {"lines", answer.lines},
                           {"has_more", answer.has_more},
                           {"exit_code", answer.exit_code}};
  return json.dump(-1, ' ', false, kReplace);
}

RunAction run_action_from_json(const std::string& text) {
  return parsed_action(text, [](const ActionJson& json) {
    RunAction action{.kind = static_cast<RunAction::Kind>(json.at("kind").get<int>()),
                     .steps = json.at("steps").get<int64_t>(),
                     .stop_signal = json.at("stop_signal").get<int>()};
    if (action.kind < RunAction::Kind::kBuild || action.kind > RunAction::Kind::kFinish || action.steps < 0)
      throw CommError("[cli.controller] {} is no action of a run; use one build for all processes",
                      json.dump());
    if (action.kind == RunAction::Kind::kBuild)
      action.request = request_from_json(json.at("request").get<std::string>());
    return action;
  });
}

RunAnswer run_answer_from_json(const std::string& text) {
  return parsed_action(text, [](const ActionJson& json) {
    return RunAnswer{.is_over = json.at("is_over").get<bool>(),
                     .lines = json.at("lines").get<std::string>(),
                     .has_more = json.at("has_more").get<bool>(),
                     .exit_code = json.at("exit_code").get<int>()};
  });
}

}  // namespace trireme::cli
