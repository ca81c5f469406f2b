#pragma once
// What a model guesses of held-out images: each rank counts its rows, and all of them together give the
// confusion matrix and the worst mistakes.
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "trireme/base/classification.h"
#include "trireme/comm/group.h"
#include "trireme/train/run_data.h"

namespace trireme::train {

class Guesses {
 public:
  static constexpr int64_t kMostMistakes = 36;
  static constexpr int64_t kMostClasses = 1000;  ///< of a matrix, which then has 8 MB

  explicit Guesses(int64_t classes);

  /// Counts B rows: logits (B, classes), targets (B) int64 on the same device, and their `samples`.
  void add(const at::Tensor& logits, const at::Tensor& targets, const std::vector<int64_t>& samples);

  /// The classification of the rows of all ranks, the same on each, whichever rank had a row. Without names
  /// and pictures, which only the data has. Collective.
  Classification of_all_ranks(comm::Group& group) const;

 private:
  void add_row(const Classification::Mistake& row);

  int64_t classes_;
  std::vector<double> counts_;  ///< of the matrix, exact; empty: it has too many classes
  double images_ = 0.0, right_ = 0.0, not_finite_ = 0.0;
  std::vector<Classification::Mistake> worst_;  ///< of these rows, largest loss first
};

/// Adds the names of classes and of samples, and the samples' pictures.
void describe(Classification& classification, const RunData& data);

}  // namespace trireme::train
