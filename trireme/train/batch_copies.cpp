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
  std::vector<at::Tensor*> copied = {&batch.inputs, &batch.targets};
  if (batch.documents.starts.defined())
    copied.insert(copied.end(), {&batch.documents.starts, &batch.documents.ends});
  if (!stream_) stream_ = guard.getStreamFromGlobalPool(device_);
  c10::Event arrived(device_.type());
  {
    const c10::StreamGuard on_stream(*stream_);
    for (at::Tensor* const tensor : copied) *tensor = tensor->to(device_, /*non_blocking=*/true);
    arrived.record(*stream_);
  }
  const c10::Stream current = guard.getStream(device_);
  arrived.block(current);
  for (const at::Tensor* const tensor : copied) tensor->record_stream(current);
  return batch;
}

}  // namespace trireme::train
