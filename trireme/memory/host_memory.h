#pragma once
// The memory of tensors on a host, and of everything else that malloc gives a process.

namespace trireme::memory {

/// From now on the process keeps what is freed, instead of handing it back to the kernel and faulting it in
/// again: activations of one step have the sizes of the step before. Tensors on the CPU then come from
/// malloc itself: a block that posix_memalign gave, as torch asks for it, fits no second request of its own
/// size, so that a step would find other places than the step before, and the process grow to twice of what
/// it holds. To be called once, before the first tensor is made.
void keep_freed_memory();

}  // namespace trireme::memory
