#pragma once
// Work of one GPU that is recorded once and then launched as one piece, as often as wanted: a CUDA graph.
// Builds without CUDA have a stand-in that records nothing.
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <functional>
#include <memory>

namespace trireme::parallel {

class Recording {
 public:
  virtual ~Recording() = default;
  /// Calls `work`, whose kernels on the current stream, and on streams that it makes wait for that one, are
  /// recorded and do not run. The current stream must be none that others use by default
  /// (recording_stream()); what ran on it before, and on the threads of autograd, has created handles and
  /// plans. `work` must not wait for the device. Throws what `work` throws, or c10::Error: then the stream is
  /// as it was before and nothing can be launched.
  virtual void record(const std::function<void()>& work) = 0;
  /// Enqueues what was recorded on the current stream. It reads and writes the memory that it did when it was
  /// recorded: tensors that `work` has left behind receive new values. Random numbers go on as if `work` had
  /// been called.
  virtual void launch() = 0;
};

/// Makes recordings that share the memory of their temporaries, so one of them runs at a time. A result that
/// one recording leaves to another must be held by a tensor until the other is recorded.
using RecordingMaker = std::function<std::unique_ptr<Recording>()>;
RecordingMaker recordings();

/// A stream to train on when passes are to be recorded: make it the current one before the engine is built,
/// because autograd runs what belongs to a parameter on the stream that was current when it was first seen.
c10::Stream recording_stream(c10::Device device);

/// Whether the current stream of `device` records; false on a CPU.
bool is_recording(c10::Device device);

/// Inside of a recording: whenever it is launched, the current stream waits for what `event` (c10::Event::
/// eventId()), recorded outside, then marks. The event must outlive the recording.
void wait_for_outside(void* event);
/// The other way round: whenever it is launched, work outside that waits for `event` from then on waits for
/// the work recorded so far.
void mark_for_outside(void* event);

}  // namespace trireme::parallel
