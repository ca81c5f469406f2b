#pragma once
// Step lines and the progress bar: what a person sees of a run while it goes on.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "trireme/base/sink.h"

namespace trireme::report {

struct ConsoleOptions {
  int64_t total_steps = 0;  ///< until Sink::begin() tells
  int64_t log_every = 10;
  int64_t ranks = 1;
  bool reads_images = false;  ///< images count as tokens in records
  double peak_flops = 0.0;    ///< of one rank's device at the compute dtype; 0: MFU is left out
  bool json = false;          ///< every step as a JSON line on stdout, the summary last
  bool quiet = false;         ///< no progress bar
  std::string run = {};       ///< its directory; empty: it is not named
  int64_t ranks_asked = 0;    ///< for resume_command()
  /// Takes lines in place of stdout.
  std::function<void(const std::string&)> write = {};
  /// Called once when a line could not be written to stdout though somebody reads it, as on a full disk.
  std::function<void()> on_lost = {};
  /// The width of the terminal behind stderr, asked whenever the bar is drawn; none, or 0: there is no
  /// terminal and hence no bar.
  std::function<int64_t()> bar_columns = {};
  /// The width of the terminal behind stdout, asked for each line; none, or 0: lines in full.
  std::function<int64_t()> line_columns = {};
};

/// stdout: a step line at step 1, every log_every steps, at validations and at the end:
/// "step  20/400  loss 3.1207  gnorm  1.92  lr 3.0e-03  12.3k tok/s (6.15k/rank)  0.06 TFLOP/s/rank   48.1 ms
///  20.8 steps/s  peak 61.2 MiB  eta 18 s", in a terminal without what has no room; then one line
/// "done ..." or "interrupted ...", where the weights are, how to go on after an interruption, and the sample
/// when there is one. The terminal, when there is one: a progress bar redrawn in place. Where stdout cannot
/// be written a warning says so, and nothing more is printed (ConsoleOptions::on_lost).
std::unique_ptr<Sink> make_console_sink(const ConsoleOptions& options);

}  // namespace trireme::report
