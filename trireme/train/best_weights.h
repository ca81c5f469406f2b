#pragma once
// The weights of a run's best validation so far, in a file that says which one it was.
#include <cstdint>
#include <optional>
#include <string>

#include "trireme/comm/mesh.h"
#include "trireme/train/monitor.h"
#include "trireme/train/trained_model.h"

namespace trireme::train {

class BestWeights {
 public:
  /// `path` is rank 0's. A run that goes on after step `done` (0: it begins) goes on from the file that is
  /// there, unless its weights are of a later step: that one is made again, so the file is put aside
  /// (aside()) until there is another. `monitor` tells what is better. Collective.
  BestWeights(std::string path, int64_t done, const comm::Mesh& mesh, Monitor monitor = {});

  /// Writes the weights as they are now when `found` is better than all before. A disk that fails is a
  /// warning. Collective.
  void keep(int64_t step, const Validation& found, TrainedModel& model);

  /// The step of the weights in the file; 0: there is no file.
  int64_t step() const { return step_; }
  /// Rank 0 knows.
  const std::string& path() const { return path_; }
  /// Where weights of steps that are made again wait for the next ones.
  std::string aside() const { return path_ + ".undone"; }

 private:
  void put_aside(int64_t step, int64_t done) const;

  std::string path_;
  Monitor monitor_;
  bool is_root_;
  int64_t step_ = 0;
  std::optional<double> score_;
};

}  // namespace trireme::train
