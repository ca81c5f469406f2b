#pragma once
// Tensors that go from one rank to another in one direction, in order: the edges of a pipeline.
#include <cstdint>
#include <memory>

namespace at {
class Tensor;
}

namespace trireme::comm {

class World;

/// One direction between two ranks. Both ends make it together, and call it equally often, in the same order,
/// with tensors of as many bytes; there may be several links between two ranks. Tensors are contiguous and on
/// the world's device. One thread of a rank uses a link at a time; links of a rank do not wait for each
/// other.
///
/// On a CPU a thread moves the bytes while the host computes: through memory on one host, where PeerOptions
/// allow that, else over TCP. On GPUs of one host that map each other's memory the sender's copy engine
/// writes into the posted tensor, which torch's allocator must have made; else they travel over NCCL, on the
/// stream that torch gave the communicator: one of 32, which it hands out again to others after that.
///
/// All throw LogicError for arguments that do not fit, or on the end that they are not for, and CommError
/// that names the other rank, the operation and what it carried when the other rank is lost, or when nothing
/// has moved within the world's deadline. A link that was lost keeps throwing. On a GPU such an error comes
/// from a later call, and by flush() at the latest. When the two ends have tensors of different sizes the one
/// that learns of it (on CPUs the receiver, through peer memory the sender) throws LogicError with both; over
/// NCCL nobody does before the deadline.
class Link {
 public:
  virtual ~Link() = default;

  /// On the sender. `tensor` travels as the current stream leaves it now; returns at once, whether or not the
  /// other side has asked for it. The link keeps the tensor until it has left; nobody writes to it before.
  virtual void send(const at::Tensor& tensor) = 0;

  /// On the receiver. The next tensor of the sender may arrive in `into` from now on, on a GPU once the
  /// current stream has come here; nobody uses it until wait(). Returns at once. Several may be posted; they
  /// arrive in the order of posts, and each is waited for before the link is destroyed. On a GPU memory of
  /// tensors that were not, as after an error, is never used again: a late copy may still arrive there.
  virtual void post(const at::Tensor& into) = 0;
  /// The host and the current stream go on when the oldest posted tensor that was not waited for has arrived.
  /// Returns that tensor. Over NCCL what was sent occupies the GPU until it has left, and loading a kernel
  /// waits for those that run: start such processes with CUDA_MODULE_LOADING=EAGER.
  virtual at::Tensor wait() = 0;

  /// On the sender. The host waits until the receiver has posted for everything that was sent, so that no
  /// message needs this host any more to leave. Call it before a collective: while CUDA loads a kernel for
  /// what comes behind it, CUDA waits for the collective and lets no other thread enqueue a message, for
  /// which the receiver may be waiting before it joins. Nothing to wait for where tensors leave without a
  /// host.
  virtual void settle() {}
  /// The host waits until everything that was sent has left, or all that was waited for has arrived, and
  /// throws what went wrong on the way. Destroying an end waits likewise, but does not throw.
  virtual void flush() = 0;
  /// Bytes of the tensors that send() took, whether they have left or not.
  virtual int64_t sent_bytes() const = 0;
};

/// From global rank `from` to global rank `to`; these two alone call it. Blocks until both have, up to the
/// deadline; throws CommError that names the missing rank. Ranks that make several links make those that they
/// share in the same order.
std::shared_ptr<Link> make_link(World& world, int64_t from, int64_t to);

}  // namespace trireme::comm
