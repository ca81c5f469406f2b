#pragma once
// Actions of a run that `trireme train --controller` gives to workers, and what worker 0 answers, as JSON.
#include <cstdint>
#include <string>

#include "trireme/cli/request.h"

namespace trireme::cli {

struct RunAction {
  enum class Kind { kBuild, kStep, kFinish };
  Kind kind = Kind::kStep;
  Request request = {};  ///< kBuild: as for the verb train
  int64_t steps = 1;     ///< kStep; 0: only what is printed and was not told yet
  int stop_signal = 0;   ///< kStep: the run ends with it as by this signal; 0: it does not
};

struct RunAnswer {
  bool is_over = false;    ///< no step is left
  std::string lines = {};  ///< for stdout
  bool has_more = false;   ///< lines, for the next answer
  int exit_code = 0;       ///< kFinish: of the run
};

std::string to_json(const RunAction& action);
std::string to_json(const RunAnswer& answer);
/// Throw CommError for other texts.
RunAction run_action_from_json(const std::string& text);
RunAnswer run_answer_from_json(const std::string& text);

}  // namespace trireme::cli
