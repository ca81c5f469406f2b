#pragma once
// Step lines and the progress bar: what a person sees of a run while it goes on.
#include <cstdint>
#include <memory>
#include <string>

#include "trireme/base/sink.h"

namespace trireme::report {

struct ConsoleOptions {
  int64_t total_steps = 0;
  int64_t log_every = 10;
  int64_t ranks = 1;
  double flops_per_token = 0.0;
  double peak_flops = 0.0;  ///< of one rank's device at the compute dtype; 0: MFU is left out
  bool json = false;        ///< every step as a JSON line on stdout, the summary last
  bool quiet = false;       ///< no progress bar
  int64_t tty_columns = 0;  ///< width of the terminal behind stderr; 0: there is none, hence no bar
};

/// stdout: a step line at step 1, every log_every steps, at validations and at the end:
/// "step  20/400  loss 3.1207  gnorm  1.92  lr 3.0e-03  12.3k tok/s (6.15k/rank)  0.06 TFLOP/s/rank   48.1 ms
///  20.8 steps/s  peak 61.2 MiB  eta 18 s" then one line "done ..." and the sample when there is one. The
///  terminal, when
/// there is one: a progress bar redrawn in place. record() and finish() throw EnvironmentError when stdout
/// cannot be written.
std::unique_ptr<Sink> make_console_sink(const ConsoleOptions& options);

}  // namespace trireme::report
