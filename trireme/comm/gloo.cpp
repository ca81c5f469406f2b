#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <chrono>
#include <cmath>

#include "trireme/comm/backend.h"

namespace trireme::comm {

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendSpec& spec) {
  const auto timeout = std::chrono::milliseconds(std::llround(spec.timeout_s * 1000.0));
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(spec.address));
  options->threads = 1;  // a group runs one operation at a time
  options->group_name = spec.name;
  return c10::make_intrusive<c10d::ProcessGroupGloo>(spec.store, static_cast<int>(spec.rank),
                                                     static_cast<int>(spec.ranks.size()), std::move(options));
}

}  // namespace trireme::comm
