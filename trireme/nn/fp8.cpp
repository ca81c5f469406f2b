#include "trireme/nn/fp8.h"

#include <ATen/ATen.h>

namespace trireme::nn {

Fp8Layer Fp8Layer::at(BlockLayer layer) const {
  const auto part = [&](const at::Tensor& magnitudes) {
    return magnitudes.defined() ? magnitudes.narrow(0, static_cast<int64_t>(layer) * kMagnitudes, kMagnitudes)
                                : at::Tensor();
  };
  return {.amax = part(amax), .seen = part(seen)};
}

at::Tensor Fp8Layer::one_of(const at::Tensor& magnitudes, int64_t which) {
  return magnitudes.defined() ? magnitudes.narrow(0, which, 1) : at::Tensor();
}

}  // namespace trireme::nn
