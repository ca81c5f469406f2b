#include "trireme/base/error.h"
#include "trireme/parallel/recording.h"

namespace trireme::parallel {

RecordingMaker recordings() {
  return []() -> std::unique_ptr<Recording> {
    throw EnvironmentError(
        "[parallel.recording] this build has no CUDA; build with -DTRIREME_CUDA=ON or set "
        "train.cuda_graphs=off");
  };
}

c10::Stream recording_stream(c10::Device device) {
  return c10::Stream(c10::Stream::DEFAULT, device);
}

bool is_recording(c10::Device) {
  return false;
}

void wait_for_outside(void*) {}
void mark_for_outside(void*) {}

}  // namespace trireme::parallel
