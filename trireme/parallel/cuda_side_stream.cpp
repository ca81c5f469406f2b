#include <exception>

#include "trireme/comm/own_stream.h"
#include "trireme/parallel/side_stream.h"

namespace trireme::parallel {
namespace {

struct Owned {
  explicit Owned(c10::Device device) : own(device), stream(own.get()) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  /// A later stream may have the handle of this one, and with it the memory that torch keeps for it: what
  /// runs here must not write to that any more.
  ~Owned() {
    if (std::uncaught_exceptions() > 0) return;  // a peer may be gone
    try {
      own.get().synchronize();  // the group's watch ends what waits in vain
    } catch (const std::exception&) {
      // The device has failed, and the next call that uses it throws.
    }
  }

  comm::OwnStream own;
  c10::Stream stream;
};

}  // namespace

std::shared_ptr<const c10::Stream> own_stream(c10::Device device) {
  const auto owned = std::make_shared<Owned>(device);
  return {owned, &owned->stream};
}

}  // namespace trireme::parallel
