#pragma once
// Large batches on their way to the device.
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <optional>

#include "trireme/data/batch.h"

namespace trireme::train {

class BatchCopies {
 public:
  explicit BatchCopies(c10::Device device) : device_(device) {}

  /// A large batch (images) on the device, for the current stream: it comes by a stream of its own, so that
  /// pinned memory is copied while the device computes what was enqueued before. The host does not wait.
  /// Others, and those on a CPU, are given back as they are.
  data::Batch ahead(data::Batch batch);

 private:
  c10::Device device_;
  std::optional<c10::Stream> stream_;  ///< made when the first large batch comes
};

}  // namespace trireme::train
