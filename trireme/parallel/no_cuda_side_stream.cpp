#include "trireme/base/error.h"
#include "trireme/parallel/side_stream.h"

namespace trireme::parallel {

std::shared_ptr<const c10::Stream> own_stream(c10::Device device) {
  throw EnvironmentError("[parallel.side_stream] this build has no CUDA for {}; build with -DTRIREME_CUDA=ON",
                         device.str());
}

}  // namespace trireme::parallel
