#pragma once
// A rank's copy of its part of the state, in host memory. On a GPU training goes on while it is made: nothing
// changes parameters and the optimizer's state before the next update, which waits for what has not arrived.
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <future>
#include <optional>
#include <vector>

#include "trireme/kernels/pinned_memory.h"

namespace trireme::train {

class StateCopy {
 public:
  /// On a GPU a thread begins to take `expected` bytes of pinned memory, which is quicker than to take more
  /// when a copy needs it.
  StateCopy(c10::Device device, int64_t expected);
  ~StateCopy();
  StateCopy(const StateCopy&) = delete;
  StateCopy& operator=(const StateCopy&) = delete;

  /// Takes a tensor of the device, and whether passes change it, and not only updates.
  using Add = std::function<void(const at::Tensor& values, bool passes_change_it)>;
  /// Copies the tensors that `visit` adds and returns the copies in its order; they last until the next
  /// take(). The device must be idle. On a GPU their bytes arrive later, unless passes change one of the
  /// tensors: then the host waits for them. `visit` is called again when there was too little memory. Throws
  /// EnvironmentError when the host has none.
  std::vector<at::Tensor> take(const std::function<void(const Add&)>& visit);
  /// The current stream may change the state from here on.
  void follow();
  /// The host waits until all bytes are there. From any thread.
  void wait() const;

  /// Bytes of the last copy.
  int64_t bytes() const { return bytes_; }

 private:
  int64_t capacity() const { return memory_.defined() ? memory_.numel() : 0; }
  int64_t copy(const std::function<void(const Add&)>& visit, std::vector<at::Tensor>& copies);
  void reserve(int64_t bytes);
  void keep(kernels::PinnedMemory pinned);

  const c10::Device device_;
  std::future<kernels::PinnedMemory> taken_;  ///< by the thread; valid until the first copy
  kernels::PinnedMemory pinned_;
  at::Tensor memory_;  ///< (capacity) bytes
  int64_t bytes_ = 0;
  std::optional<c10::Stream> stream_;  ///< of a GPU's copies
  std::optional<c10::Event> copied_;
};

}  // namespace trireme::train
