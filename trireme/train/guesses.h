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

  /// Rows with logits (B, classes) and targets (B) int64 on one device, which are these samples.
  void add(const at::Tensor& logits, const at::Tensor& targets, const std::vector<int64_t>& samples);

  /// Of the rows of all ranks, whichever has had them: the same on each. Without what only the data knows:
  /// names and pictures. Collective.
  Classification of_all_ranks(comm::Group& group) const;

 private:
  void add_row(const Classification::Mistake& row);

  int64_t classes_;
  std::vector<double> counts_;  ///< of the matrix, exact; empty: it has too many classes
  double images_ = 0.0, right_ = 0.0, not_finite_ = 0.0;
  std::vector<Classification::Mistake> worst_;  ///< of these rows, largest loss first
};

/// Names of classes and of samples, and their pictures.
void describe(Classification& classification, const RunData& data);

}  // namespace trireme::train
