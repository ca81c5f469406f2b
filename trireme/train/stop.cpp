#include "trireme/train/stop.h"

#include <algorithm>

namespace trireme::train {

int signal_of_any_rank(const TrainOptions& options, const comm::Mesh& mesh) {
  int signal = 0;
  for (const auto& rank : comm::gather_scalars(*mesh.all, {static_cast<double>(signal_heard(options))})) {
    signal = std::max(signal, static_cast<int>(rank[0]));
  }
  return signal;
}

}  // namespace trireme::train
