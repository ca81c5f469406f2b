#include "trireme/train/batch_copies.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace trireme::train {
namespace {

/// Smaller batches take less time to copy than a second stream costs the host.
constexpr int64_t kLargeBytes = int64_t{1} << 20;

}  // namespace

data::Batch BatchCopies::ahead(data::Batch batch) {
  if (device_.is_cpu() || static_cast<int64_t>(batch.inputs.nbytes()) < kLargeBytes) return batch;
  const c10::impl::VirtualGuardImpl guard(device_.type());
  if (!stream_) stream_ = guard.getStreamFromGlobalPool(device_);
  c10::Event arrived(device_.type());
  {
    const c10::StreamGuard on_stream(*stream_);
    batch.inputs = batch.inputs.to(device_, /*non_blocking=*/true);
    batch.targets = batch.targets.to(device_, /*non_blocking=*/true);
    arrived.record(*stream_);
  }
  const c10::Stream current = guard.getStream(device_);
  arrived.block(current);
  batch.inputs.record_stream(current);
  batch.targets.record_stream(current);
  return batch;
}

}  // namespace trireme::train
