#pragma once
// The forward and backward passes of a step, one a micro-batch: by the engine's code, or by launching what
// that code enqueued when the pass was recorded.
#include <ATen/core/Tensor.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "trireme/data/batch.h"
#include "trireme/nn/documents.h"
#include "trireme/nn/model.h"
#include "trireme/parallel/data_parallel.h"
#include "trireme/parallel/recording.h"
#include "trireme/train/batch_copies.h"

namespace trireme::train {

class Passes {
 public:
  /// When passes are recorded. kDeviceIdles: only when the device waits for its host
  /// (plan::device_waits_for_host), since recordings would else only hold memory. That is measured in the
  /// steps before recording, at whose ends the host then waits for the device.
  enum class When { kAlways, kDeviceIdles };

  struct Options {
    int64_t accumulation = 1;  ///< passes a step
    int64_t rows = 0;          ///< of a micro-batch; passes with fewer rows are never recorded
    int64_t step_rows = 0;     ///< of all ranks; nor are passes of a step with fewer, whose rows weigh more
    int64_t loss_chunk_bytes = nn::kLossChunkBytes;
    /// With it, passes are recorded after plan::kStepsBeforeRecording steps: the engine can be recorded
    /// (DataParallel::can_be_recorded()), it was built while parallel::recording_stream() was the current
    /// stream, and steps run on that one. Passes that cannot be recorded run as usual, after one warning that
    /// says why. Set on all data-parallel ranks or on none.
    parallel::RecordingMaker make_recording = {};
    When when = When::kAlways;
  };

  /// `model` runs through `engine` (connect()), on `device`; both must outlive this.
  Passes(nn::Model& model, parallel::DataParallel& engine, c10::Device device, Options options);

  /// One pass for each micro-batch of the step (data::Batch::step_passes) that next() gives, gradients
  /// reduced at the end of the last: a step without its update. Each counts by its share of the step, and
  /// gradients are multiplied by `scale`. Returns the sum of the losses by their shares, an fp64 scalar on
  /// the device. Collective.
  at::Tensor run(const std::function<data::Batch()>& next, double scale);

  /// Switches the measuring of activation_bytes() on or off.
  void measure_activations(bool on) { measures_ = on; }
  /// Bytes that torch's allocator gave out in a forward pass and that were still held at its end, in the
  /// largest measured pass; 0: none was measured.
  int64_t activation_bytes() const { return activation_bytes_; }

  /// Kinds of passes that are launched from now on instead of being run.
  int64_t recorded() const;

 private:
  /// Passes of a kind enqueue the same work.
  enum Kind : size_t { kFirst, kMiddle, kLast, kKinds };
  struct Recorded {
    std::unique_ptr<parallel::Recording> recording;
    at::Tensor loss;  ///< where each launch leaves it
    double scale = 0.0;
    parallel::DataParallel::Progress after;
    int64_t reductions = 0;
  };

  at::Tensor pass(const data::Batch& batch, double scale, Kind kind);
  /// What a pass reads, on the device.
  struct Given {
    at::Tensor inputs, targets;
    nn::Documents documents;
  };
  Given on_device(const data::Batch& batch) const;
  at::Tensor loss_of(const Given& given, double scale);
  at::Tensor compute(const Given& given, double scale, Kind kind);
  bool measures_lag() const;
  void decide();
  void measure_lag(double began);
  bool fits_recordings(const data::Batch& batch) const;
  void take_in(const data::Batch& batch);
  bool record(double scale, Kind kind);
  at::Tensor launch(Recorded& recorded, Kind kind);
  void give_up(const std::string& reason);

  nn::Model& model_;
  parallel::DataParallel& engine_;
  c10::Device device_;
  Options options_;  ///< no make_recording: nothing is recorded
  BatchCopies copies_;
  int64_t steps_ = 0;
  bool measures_ = false;
  int64_t activation_bytes_ = 0;
  std::vector<double> lags_;  ///< as plan::device_waits_for_host() takes them
  Given given_;               ///< what recorded passes read
  std::array<Recorded, kKinds> kinds_;
};

}  // namespace trireme::train
