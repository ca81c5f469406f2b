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
  /// `path` is rank 0's, and `best` what the run's checkpoint knows, which is kept up to date; both outlive
  /// this. `monitor` tells what is better. A run that goes on after step `done` (0: it begins) goes on from
  /// the file that is there, if its weights are those of `best`, or of a validation right after that step.
  /// Else they are of steps that are made again, or of another branch of the run: then the file is put aside
  /// (aside()) until there are better weights than those of `best`. Collective.
  BestWeights(std::string path, int64_t done, const comm::Mesh& mesh, Monitor monitor, BestValidation& best);

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
  struct Found {
    int64_t step = 0;  ///< 0: there are none, or they are another branch's
    double score = 0.0;
  };
  Found find(int64_t done) const;
  bool are_ours(const Found& found, int64_t done) const;
  void put_aside(int64_t step, int64_t done) const;

  std::string path_;
  bool is_root_;
  BestValidation& best_;
  int64_t step_ = 0;
};

}  // namespace trireme::train
