#pragma once
// How long a step takes: the actions of its programs with their costs at the rates of a machine, in streams
// that wait for each other. Nothing is fitted to steps that were measured.
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "trireme/plan/rates.h"
#include "trireme/plan/step_program.h"
#include "trireme/plan/unit_work.h"

namespace trireme::plan {

/// The costs of the actions of one rank, by unit of its program.
struct ActionCosts {
  std::vector<UnitWork> work;
  UnitWork whole = {};              ///< of passes that are one action for all of a model
  std::vector<double> update = {};  ///< seconds, the norm of gradients included; empty: nothing
  std::vector<double> sum = {};     ///< seconds in which gradients of micro-batches are added; empty: nothing
  double update_bytes = 0.0;        ///< that all updates of the rank move, with the norm of gradients
};

/// Facts that all ranks have in common.
struct TimingSetting {
  std::function<double(const Transfer&)> transfer_s;  ///< of collectives and messages
  bool beside = false;                                ///< communication runs beside computation
  bool runs_ahead = false;  ///< the host launches ahead of its device; else each launch takes time of a rank
  double launch_s = 0.0;
  bool needs_norm = false;    ///< an update waits for all reductions of the step
  double norm_s = 0.0;        ///< in which ranks exchange their part of that norm
  int64_t micro_batches = 1;  ///< of the step; a program without stages may show fewer
};

/// The seconds of one unit in a step.
struct UnitSeconds {
  std::string name;
  double computing = 0.0, gathering = 0.0, reducing = 0.0;
  double waiting = 0.0;  ///< for its parameters or gradients
};

struct RankSeconds {
  std::array<double, kTimeCauses> causes{};  ///< their sum is the step's time
  double communicating = 0.0;                ///< in collectives; messages of stages are not counted
  std::vector<UnitSeconds> units;
  double operator[](TimeCause cause) const { return causes[static_cast<size_t>(cause)]; }
  /// The part of `communicating` in which nothing was computed.
  double exposed() const;
};

struct StepTime {
  double seconds = 0.0;
  std::vector<RankSeconds> ranks;  ///< of a pipeline, else one
  int64_t tokens = 0;              ///< of the global batch
  double mfu = 0.0;                ///< FLOPs of the model a second and rank, as a share of `peak`
  double peak = 0.0;               ///< FLOPs a second
  double tokens_per_s() const { return static_cast<double>(tokens) / seconds; }
  /// The rank that waits least for others.
  const RankSeconds& busiest() const;
  /// The share of the ranks' time in which the pipeline leaves them idle.
  double idle() const;
};

/// Runs the programs of all ranks of a pipeline, or of one rank, beside each other, for the second of two
/// steps: transfers that the first one has begun may still be under way. Throws ConfigError where a message
/// never comes.
StepTime time_of_programs(const std::vector<StepProgram>& programs, const std::vector<ActionCosts>& costs,
                          const TimingSetting& setting);

/// The work of the kernels of rank 0 in a step, by kind.
struct StepWork {
  struct Amount {
    double flops = 0.0, bytes = 0.0;  ///< as Work has them; 0: not counted
  };
  std::array<Amount, kKernelKinds> amounts{};
  std::string dtype;  ///< of computation, as rates list it
  bool fp8 = false;   ///< products are in FP8, some or all
  const Amount& operator[](KernelKind kind) const { return amounts[static_cast<size_t>(kind)]; }
};
/// Counted from shapes, whatever the rates of a machine. Throws as step_time().
StepWork step_work(const Config& config, int64_t ranks, Device device);

/// The step of a run of `config` on `ranks` ranks. `device` is kCpu or kCuda. Throws ConfigError when ranks,
/// mesh and batch do not fit each other, for models of images, and as Rates does.
StepTime step_time(const Config& config, int64_t ranks, Device device, const Rates& rates);

}  // namespace trireme::plan
