#pragma once
// Times what a rank of a pipeline does: by events on a GPU's stream, by the monotonic clock on a CPU.
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <memory>
#include <vector>

#include "trireme/plan/pipeline_report.h"

namespace trireme::comm {
class Group;
}
namespace trireme::kernels {
class AllocationWatch;
}

namespace trireme::parallel {

class PipelineRecorder {
 public:
  explicit PipelineRecorder(c10::Device device);
  ~PipelineRecorder();
  PipelineRecorder(const PipelineRecorder&) = delete;
  PipelineRecorder& operator=(const PipelineRecorder&) = delete;

  /// Records a step while it lives: forgets the step before, and counts what torch's allocators give out,
  /// unless somebody else listens to them (kernels::AllocationWatch, torch's profiler). Without a recorder it
  /// does nothing.
  class Step {
   public:
    explicit Step(PipelineRecorder* recorder);
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    PipelineRecorder* recorder_;
  };
  /// Records an event, from construction to destruction. Without a recorder it does nothing.
  class Span {
   public:
    Span(PipelineRecorder* recorder, const plan::Action& action);
    Span(PipelineRecorder* recorder, plan::ActionKind kind);
    ~Span();
    Span(const Span&) = delete;
    Span& operator=(const Span&) = delete;

   private:
    void begin();
    PipelineRecorder* recorder_;
    plan::StageEvent event_ = {};
    double held_before_ = 0.0;
    int exceptions_ = 0;  ///< under way at its begin
  };
  /// Bytes of the message that the innermost span sends, or that a backward pass for the input has left.
  void counts(int64_t bytes) { counted_bytes_ = static_cast<double>(bytes); }

  bool has_step() const { return has_step_; }
  /// Events of the last step in seconds of this host's monotonic clock. The host waits for the device.
  std::vector<plan::StageEvent> events();

 private:
  /// Moments are numbered: two for each event of the step.
  void mark();
  double held() const;
  std::vector<double> moments();

  c10::Device device_;
  std::vector<plan::StageEvent> events_;
  std::vector<double> host_moments_;     ///< on a CPU
  std::vector<c10::Event> gpu_moments_;  ///< kept from step to step
  size_t marked_ = 0;
  bool has_step_ = false;
  double counted_bytes_ = 0.0;
  std::unique_ptr<kernels::AllocationWatch> watch_;
};

/// For each rank of the group, what must be added to its monotonic clock to get the clock of the first rank,
/// and how wrong that may be; ranks of one host share a clock. Collective; the host waits.
std::vector<plan::ClockOffset> align_clocks(comm::Group& group);

/// Every rank's events on the clock of the first. Collective; the host waits.
plan::StageEvents gather_events(comm::Group& group, std::vector<plan::StageEvent> mine,
                                const std::vector<plan::ClockOffset>& offsets);

}  // namespace trireme::parallel
