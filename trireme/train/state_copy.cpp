#include "trireme/train/state_copy.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <utility>

#include "trireme/base/log.h"
#include "trireme/base/text.h"
#include "trireme/plan/saved_copy.h"

namespace trireme::train {
namespace {

static_assert(kernels::PinnedMemory::kPage == plan::kPinnedPage, "plans count what is taken");

c10::impl::VirtualGuardImpl streams_of(const c10::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

}  // namespace

StateCopy::StateCopy(c10::Device device, int64_t expected) : device_(device) {
  if (device.is_cpu()) return;
  stream_ = streams_of(device).getStreamFromGlobalPool(device, /*isHighPriority=*/false);
  copied_.emplace(device.type());
  if (expected == 0) return;
  taken_ = std::async(std::launch::async, [device, expected] {
    streams_of(device).setDevice(device);  // else the thread would make a context on the first GPU
    return kernels::PinnedMemory(expected);
  });
}

StateCopy::~StateCopy() {
  if (taken_.valid()) taken_.wait();
  try {
    if (stream_) stream_->synchronize();  // the memory goes
  } catch (const c10::Error&) {           // of a device that has failed: nothing is copied any more
  }
}

void StateCopy::keep(kernels::PinnedMemory pinned) {
  if (!pinned.problem().empty()) {
    log_warning(
        "{} of host memory for checkpoints cannot be pinned ({}); training waits while the state is copied",
        format_bytes(pinned.bytes()), pinned.problem());
  }
  memory_ = at::from_blob(pinned.data(), {pinned.bytes()}, at::kByte);
  pinned_ = std::move(pinned);
}

void StateCopy::reserve(int64_t bytes) {
  memory_.reset();
  if (device_.is_cpu()) {
    memory_ = at::empty({bytes}, at::kByte);
    return;
  }
  wait();
  pinned_ = {};  // before as much again is taken
  keep(kernels::PinnedMemory(bytes));
}

/// Copies the tensors for which there is memory. Returns the bytes that all of them need.
int64_t StateCopy::copy(const std::function<void(const Add&)>& visit, std::vector<at::Tensor>& copies) {
  // State that is decoded for a copy is decoded on the stream of copies, so that its memory can be used again
  // there.
  std::optional<c10::StreamGuard> guard;
  if (stream_) guard.emplace(*stream_);
  int64_t bytes = 0;
  bool at_once = false;
  copies.clear();
  visit([&](const at::Tensor& values, bool passes_change_it) {
    const auto size = static_cast<int64_t>(values.nbytes());
    if (bytes + size <= capacity()) {
      copies.push_back(memory_.narrow(0, bytes, size).view(values.scalar_type()));
      copies.back().copy_(values, /*non_blocking=*/true);
      at_once = at_once || passes_change_it;
    }
    bytes += plan::saved_piece_bytes(size);
  });
  if (copied_) copied_->record(*stream_);
  if (at_once) wait();
  return bytes;
}

std::vector<at::Tensor> StateCopy::take(const std::function<void(const Add&)>& visit) {
  const at::NoGradGuard no_grad;
  if (taken_.valid()) keep(taken_.get());
  std::vector<at::Tensor> copies;
  while ((bytes_ = copy(visit, copies)) > capacity()) reserve(bytes_);
  return copies;
}

void StateCopy::follow() {
  if (copied_) copied_->block(streams_of(device_).getStream(device_));
}

void StateCopy::wait() const {
  if (!copied_) return;
  streams_of(device_).setDevice(device_);
  copied_->synchronize();
}

}  // namespace trireme::train
