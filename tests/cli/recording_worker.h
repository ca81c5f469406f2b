#pragma once
// A script in the worker's place that leaves behind what it was given.
#include <string>

namespace trireme::cli {

/// A worker that leaves its request and its environment behind and ends with code `code`.
inline std::string recorder(int code) {
  return "printf %s \"$TRIREME_REQUEST\" > request-${RANK:-none}\n"
         "env > env-${RANK:-none}\n"
         "echo verb $1\n"
         "exit " +
         std::to_string(code);
}

/// Lines of a worker that leave what a run of bytes and eight steps of a millisecond would have measured.
inline std::string leave_summary() {
  return "run=$(printf %s \"$TRIREME_REQUEST\" | sed 's/.*\"run_dir\":\"\\([^\"]*\\)\".*/\\1/')\n"
         "for step in 1 2 3 4 5 6 7 8; do echo \"{\\\"step\\\": $step, \\\"step_ms\\\": 1.0}\"; done "
         "> \"$run\"/metrics.jsonl\n"
         "cat > \"$run\"/summary.json << END\n"
         "{\"peak_bytes\": 8, \"baseline_bytes\": 1, \"predicted_peak_bytes\": 8,\n"
         " \"state_bytes\": {\"predicted\": {\"parameters\": 1, \"gradients\": 1, \"optimizer\": 2},\n"
         "                 \"measured\": {\"parameters\": 1, \"gradients\": 1, \"optimizer\": 2}},\n"
         " \"wire_bytes_per_step\": {\"predicted\": 1, \"measured\": 1}, \"gathered_bytes\": {\"predicted\": "
         "0},\n"
         " \"activation_bytes\": {\"predicted\": 1, \"measured\": null},\n"
         " \"communication_ms\": {\"total\": null, \"exposed\": null}}\n"
         "END\n";
}

}  // namespace trireme::cli
