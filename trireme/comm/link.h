#pragma once
// Tensors that go from one rank to another in one direction, in order: the edges of a pipeline.
#include <cstdint>
#include <memory>

namespace at {
class Tensor;
}

namespace trireme::comm {

class World;

/// One direction between two ranks. Both ends make it together, and call it equally often with tensors of the
/// same size. One thread of a rank uses a link at a time. All throw LogicError for arguments that do not fit and
/// CommError, which names the other rank, when it is lost or late.
class Link {
 public:
  virtual ~Link() = default;

  /// On the sender. `tensor` (contiguous) travels as the current stream leaves it now; returns at once, whether
  /// or not the other side has asked for it. The link keeps the tensor until it has left; nobody writes to it
  /// before.
  virtual void send(const at::Tensor& tensor) = 0;

  /// On the receiver. The next tensor of the sender may arrive in `into` from now on, which nobody uses until
  /// wait(); returns at once. Several may be posted; they arrive in the order of posts.
  virtual void post(const at::Tensor& into) = 0;
  /// The current stream, on a CPU the host, goes on when the oldest posted tensor that was not waited for has
  /// arrived, and returns it.
  virtual at::Tensor wait() = 0;

  /// The host waits until everything sent has left, and throws what went wrong on the way.
  virtual void flush() = 0;
  /// Bytes that this rank has sent.
  virtual int64_t sent_bytes() const = 0;
};

/// From global rank `from` to global rank `to`; called by these two alone.
std::shared_ptr<Link> make_link(World& world, int64_t from, int64_t to);

}  // namespace trireme::comm
