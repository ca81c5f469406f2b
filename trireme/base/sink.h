#pragma once
// The records of a training run, pushed into sinks. The loop knows this interface only; the run directory,
// TensorBoard and the console implement it.
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace trireme {

/// Samples that a run has read of one of several sources.
struct SourceUse {
  std::string name;
  double share = 0.0;   ///< of the samples of the run, by its weight
  int64_t samples = 0;  ///< read so far
  double epochs = 0.0;  ///< how often it has been gone through
};

/// One optimizer step. Times in milliseconds, memory in bytes, losses in nats per token; for models of images
/// an image is a token.
struct StepRecord {
  int64_t step = 0;        ///< 1 after the first optimizer step
  double loss = 0.0;       ///< mean over the global batch
  double grad_norm = 0.0;  ///< global L2 norm before clipping
  double lr = 0.0;
  int64_t tokens = 0;            ///< seen so far by all ranks
  double tokens_per_s = 0.0;     ///< all ranks together
  double tflops_per_rank = 0.0;  ///< the model's TFLOP/s on each rank; 0: not known
  double step_ms = 0.0;          ///< from the end of the step before, or from its beginning after a pause
  int64_t peak_bytes = 0;        ///< largest rank: allocator peak on a GPU, resident peak on a CPU
  int64_t active_bytes = 0;      ///< largest rank: peak with freed blocks that are still in use; 0 on a CPU
  int64_t reserved_bytes = 0;    ///< largest rank: allocator's reserved peak on a GPU, 0 on a CPU
  std::optional<double> loss_scale = {};  ///< what the loss was multiplied by; none: it is not scaled
  bool skipped = false;                   ///< its gradients overflowed and were not applied
  std::optional<double> val_loss = {};    ///< when this step validated
  std::optional<double> val_top1 = {}, val_top5 = {};  ///< likewise, of images: accuracies in [0, 1]
  std::map<std::string, double> val_metrics = {};      ///< likewise, a program's own, by their names
  std::vector<SourceUse> sources = {};                 ///< of a mixture
  /// Time of rank 0 in gathers and reductions, and the part of it that computation waited for. None: not
  /// measured. They are measured on a CPU in every step, on a GPU every train.log_every steps, unless that is
  /// 1, and in the last step, and never without data parallelism.
  std::optional<double> communication_ms = {}, exposed_ms = {};
  /// How long training waited for the checkpoint of this step; with checkpoint.async, until its copy was
  /// made. None: this step saved no checkpoint.
  std::optional<double> checkpoint_ms = {};

  double steps_per_s() const { return step_ms > 0.0 ? 1e3 / step_ms : 0.0; }
  /// The share of the step in which computation waited for communication.
  std::optional<double> communication_share() const {
    if (!exposed_ms || step_ms <= 0.0) return std::nullopt;
    return *exposed_ms / step_ms;
  }
};

/// Memory and messages that a run's parallel layout cost a rank (rank 0 unless a member says otherwise),
/// beside the predictions of plan/memory.h.
struct RunCost {
  struct State {
    int64_t parameters = 0, gradients = 0, optimizer = 0;
    int64_t total() const { return parameters + gradients + optimizer; }
  };
  State predicted, measured;  ///< bytes held between steps
  /// Sent in a step, with local SGD in one that averages. None: no formula tells for this communication hook.
  std::optional<int64_t> predicted_wire_bytes = 0;
  int64_t measured_wire_bytes = 0;         ///< sent in a full step by the rank that sends most
  int64_t predicted_activation_bytes = 0;  ///< kept for backward by one micro-batch, without the loss
  /// Measured by torch's allocator: bytes that a forward pass took and still held at its end, on the rank
  /// where that was most. None: not measured, since the profiler ran.
  std::optional<int64_t> measured_activation_bytes = {};
  /// The copy that checkpoints are written from: predicted for the largest rank, measured on rank 0. 0:
  /// nothing was saved.
  int64_t predicted_copy_bytes = 0, measured_copy_bytes = 0;
  int64_t predicted_gathered_bytes = 0;  ///< whole parameters and gradients of units in flight
  int64_t baseline_bytes = 0;            ///< resident before there was a model; 0 on a GPU
  int64_t predicted_peak_bytes = 0;      ///< for RunSummary::peak_bytes
  /// The times of the last step, as its StepRecord has them.
  std::optional<double> communication_ms = {}, exposed_ms = {};
};

/// Why a run ended before its last step: validations became no better (train.early_stop), or a callback of
/// the program ended it.
struct EarlyEnd {
  int64_t step = 0;                       ///< of the validation that ended it
  int64_t best_step = 0;                  ///< of the best validation; 0: none was finite
  std::optional<double> best_value = {};  ///< its loss, or what `metric` names
  int64_t validations = 0;                ///< since then
  std::string metric = "loss";            ///< that decided, as train.monitor has it
  bool higher_is_better = false;          ///< of that metric
  std::string reason = {};                ///< of a callback; empty: train.early_stop ended the run
};

/// The time of one kind of kernel or operator.
struct KernelGroup {
  std::string name;   ///< GEMM, attention, norm, ...
  double ms = 0.0;    ///< sum over its calls, a step
  int64_t calls = 0;  ///< a step
};

/// Where the time of rank 0 went in the steps that train.profile_steps traced: kernels of its GPU, which may
/// run at once in several streams, or without a GPU operators of the CPU.
struct KernelProfile {
  bool of_gpu = false;
  int64_t steps = 0;                ///< that were traced
  std::vector<KernelGroup> groups;  ///< longest first; empty: nothing was recorded
  double step_ms = 0.0;             ///< from the first kernel or operator to the last, a step
  double idle_ms = 0.0;             ///< of it, while none ran
};

/// The whole run, written once at its end.
struct RunSummary {
  int64_t steps = 0;
  double final_loss = 0.0;
  std::optional<double> final_val_loss;
  std::optional<double> final_val_top1 = {}, final_val_top5 = {};
  std::map<std::string, double> final_val_metrics = {};
  std::vector<SourceUse> sources = {};  ///< of a mixture, in the whole run
  double tokens_per_s = 0.0;            ///< median over the steps after warm-up; 0: there were none
  double steps_per_s = 0.0;             ///< of the same steps
  int64_t peak_bytes = 0;
  int64_t active_bytes = 0;
  int64_t reserved_bytes = 0;
  /// peak_bytes of each rank of a pipeline, the largest of its data-parallel ranks; empty: no pipeline.
  std::vector<int64_t> peak_bytes_by_pp_rank = {};
  double seconds_to_first_step = 0.0;  ///< from the start of the process to the end of step 1
  double wall_s = 0.0;
  std::string weights_digest;  ///< XXH3-64 of all fp32 master parameters in name order, 16 hex digits
  std::string why_bits_vary;   ///< why an equal run may end with another digest; empty: it cannot
  RunCost cost;
  std::string sample;             ///< generated text, empty when none was asked for
  std::string weights_path;       ///< where the final weights were written; empty: nowhere
  std::string best_weights_path;  ///< where the weights of the best validation are; empty: not kept
  int64_t best_step = 0;          ///< the step of that validation
  int64_t resumed_at = 0;         ///< step of the checkpoint that the run went on from; 0: none
  int64_t checkpoints = 0;        ///< written
  int64_t checkpoints_late = 0;   ///< skipped, since the one before was still being written
  int64_t checkpoints_failed = 0;
  int stop_signal = 0;                        ///< the signal that ended the run early; 0: none
  std::optional<KernelProfile> profile = {};  ///< none: no step was traced
  std::optional<EarlyEnd> early_end = {};     ///< none: the run has made all its steps, or a signal ended it
};

/// Receives records on rank 0, from the training thread. Implementations throw EnvironmentError when a disk
/// fails.
class Sink {
 public:
  virtual ~Sink() = default;
  /// Called before the other functions: the run ends with step `steps`.
  virtual void begin([[maybe_unused]] int64_t steps) {}
  /// The run goes on after step `step` of an earlier attempt: records of later steps are void. Returns false
  /// when the record of `step` itself is missing, because the run was killed before it was written.
  virtual bool resume([[maybe_unused]] int64_t step) { return true; }
  /// Called once after every step, in rising order of steps. A resumed run begins with the step after its
  /// checkpoint, or with the checkpoint's own step where resume() returned false.
  virtual void record(const StepRecord& step) = 0;
  /// Called once, after the last record(), by a run that was not ended by an error. A run that a signal ended
  /// has RunSummary::stop_signal.
  virtual void finish(const RunSummary& summary) = 0;
};

}  // namespace trireme
