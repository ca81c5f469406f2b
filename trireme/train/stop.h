#pragma once
// Ending a run early: what a rank has been told, and how that ends what has no step to finish.
#include <exception>

#include "trireme/comm/mesh.h"
#include "trireme/train/trainer.h"

namespace trireme::train {

/// The signal that this rank has been sent; 0: none.
inline int signal_heard(const TrainOptions& options) {
  return options.stop_signal != nullptr ? options.stop_signal->load() : 0;
}

/// A signal that some rank has been sent, the same answer on every rank; 0: none. Collective; the host waits.
int signal_of_any_rank(const TrainOptions& options, const comm::Mesh& mesh);

/// Thrown on every rank alike where a signal ends a run before its first step.
class Stopped : public std::exception {
 public:
  explicit Stopped(int signal) : signal_(signal) {}
  int signal() const { return signal_; }
  const char* what() const noexcept override { return "a signal ended the run before its first step"; }

 private:
  int signal_;
};

}  // namespace trireme::train
