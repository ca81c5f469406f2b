#include "trireme/nn/model.h"

namespace trireme::nn {

at::Tensor Model::run(std::span<const Unit> units, at::Tensor x) const {
  bool begins_pass = true;
  for (const Unit& unit : units) {
    const bool announced = runner_ && unit.has_parameters;
    x = announced ? runner_(unit, x, begins_pass) : unit.forward(x);
    begins_pass = begins_pass && !announced;
  }
  return x;
}

}  // namespace trireme::nn
