#pragma once
// The curves of runs: of one run with several of them in a chart, of several runs each in its own colour.
#include <string>
#include <vector>

#include "trireme/report/html.h"
#include "trireme/report/run_record.h"

namespace trireme::report {

/// A note for readers about curves with more points than places; empty: there are none.
std::string sharing_note(const std::vector<RunRecord>& runs);

/// All that one run recorded. Keys of metrics.jsonl that no chart is made for get one each.
Markup draw_run_charts(const RunRecord& run);

/// The training curves of a run as a picture by itself: losses, accuracy, learning rate, gradient norm, step
/// time and throughput. Empty when there is no step. SVG.
std::string draw_training_curves(const RunRecord& run);

/// The charts of several runs, their curves over each other; `names` are for the legends.
Markup draw_compared_charts(const std::vector<RunRecord>& runs, const std::vector<std::string>& names);

}  // namespace trireme::report
