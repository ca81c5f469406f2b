#pragma once
// One StepRecord as one line of aligned columns.
#include <optional>
#include <string>

#include "trireme/base/sink.h"
#include "trireme/report/console.h"

namespace trireme::report {

/// How much step lines say: everything, down to 0: step, loss and validation alone.
inline constexpr int64_t kFullDetail = 10;

/// Without newline. `eta_s` seconds to go; left out when there is no estimate or nothing left to do. Each
/// level of `detail` below kFullDetail leaves out one thing more, the least needed first.
std::string step_line(const StepRecord& record, const ConsoleOptions& options, std::optional<double> eta_s,
                      int64_t detail = kFullDetail);

/// "ended after step 40: the validation loss was 2.0110 after step 20, and no lower in the 2 validations
/// since (train.early_stop)".
std::string early_end_text(const EarlyEnd& end);

/// "done 400 steps in 18.2 s  loss 1.9321  val 2.0110  12.3k tok/s  peak 61.2 MiB  weights 0123456789abcdef",
/// "done 13 steps (16 to 28) in 2.60 s ..." of a run that went on, or "interrupted by SIGINT after step 57 of
/// 400, in 2.60 s ...".
std::string done_line(const RunSummary& summary, int64_t total_steps, bool reads_images = false);

/// Where the run and its weights are, and after an interruption how to go on; a line each, without the last
/// newline. `run` is its directory, and `ranks` as resume_command() has it.
std::string whereabouts(const RunSummary& summary, const std::string& run, bool reads_images = false,
                        int64_t ranks = 0);

/// "[#####...............] 100/400  loss 3.1207  12.3k tok/s  eta 18 s", at most `columns` wide.
std::string progress_bar(const StepRecord& record, int64_t total_steps, std::optional<double> eta_s,
                         int64_t columns, bool reads_images = false);

/// "18 s" below 100 seconds, then as format_duration.
std::string format_eta(double seconds);

}  // namespace trireme::report
